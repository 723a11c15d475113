"""Does feeding hide behind training? One node, `model.fit` fed by Spark, on the CPU.

Runs the fed training, the same training on arrays in memory and the feed alone, each in a process
of its own, in turn, round after round, and prints the total over the longer of the two parts.
`README.md` says what is measured and why so.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import runner
from runner import Figure

READY = "fit, fed by Spark, ready for restarts"
NAMES = {"fed": "fit, fed by Spark", "memory": "fit, arrays in memory", "feed": "feed alone"}
AIM = 1.1


@dataclass(frozen=True)
class Run:
    """What came of running one way once.

    Attributes:
        round: The number of the round; round 0 warms the machine up and does not count.
        load: The machine's one-minute load average just before.
        seconds: For all epochs, or None.
        cpu_s: CPU seconds, user and system, of all processes meanwhile, or None.
        step_ms: The median of the steps after the first epoch, milliseconds, or None.
    """

    contestant: str
    round: int
    load: float
    seconds: float | None = None
    cpu_s: float | None = None
    step_ms: float | None = None
    error: str | None = None
    left_behind: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """A line of the table: seconds for all epochs, CPU seconds, milliseconds of a later step."""

    contestant: str
    seconds: Figure | None
    cpu_s: Figure | None
    step_ms: Figure | None


def summarise(runs: Sequence[Run]) -> tuple[list[Row], float | None]:
    """Return the rows, and the total over the longer of its parts, medians."""
    rows = {}
    for name in dict.fromkeys(run.contestant for run in runs):
        counted = [run for run in runs if run.contestant == name and run.round]
        rows[name] = Row(
            name,
            Figure.of(run.seconds for run in counted),
            Figure.of(run.cpu_s for run in counted),
            Figure.of(run.step_ms for run in counted),
        )
    figures = [rows[name].seconds if name in rows else None for name in NAMES.values()]
    if not all(figures):
        return list(rows.values()), None
    total, *parts = (figure.median for figure in figures if figure)
    return list(rows.values()), total / max(parts)


def main() -> None:
    """Run the rounds, print the table and write the JSON."""
    parser = runner.options(__doc__, "overlap", deadline_s=300)
    parser.add_argument("--rows", type=float, default=0.5, help="a factor on 160,000 rows")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--hidden", type=int, default=256, help="width of the model: training is to be as long"
    )
    parser.add_argument(
        "--data", type=Path, help="folder for the data, kept; otherwise a temporary one"
    )
    parsed = parser.parse_args()
    kind = next(kind for kind in datasets.KINDS if kind.name == "wide")
    runs = []
    with ExitStack() as stack:
        folder = parsed.data or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-overlap-"))
        )
        data, _ = datasets.make(kind, folder.resolve(), parsed.rows)
        arguments = [f"--{key}={getattr(data, key)}" for key in ("path", "files", "rows", "nbytes")]
        arguments += [f"--epochs={parsed.epochs}", f"--hidden={parsed.hidden}"]
        for number in range(parsed.repeats + 1):
            for mode, name in {**NAMES, "ready": READY}.items():
                if not parsed.only.search(name):
                    continue
                outcome = runner.run(
                    parsed.python, "overlap.py", [*arguments, f"--mode={mode}"], parsed.deadline_s
                )
                done = next(iter(outcome.events("done")), {})
                seconds = done.get("seconds")
                figures = [done.get(key) for key in ("seconds", "cpu_s", "step_ms")]
                ends = outcome.error, outcome.left_behind
                runs.append(Run(name, number, outcome.load, *figures, *ends))
                result = f"failed: {outcome.error}" if seconds is None else f"{seconds:.2f} s"
                print(f"round {number}: {name}: {result}", file=sys.stderr)
    rows, overlap = summarise(runs)
    header = ["median (min-max)", f"seconds, {parsed.epochs} epochs of {data.rows} rows", "CPU s"]
    header.append("ms, a step after the first epoch")
    lines = [[row.contestant, row.seconds or "failed", row.cpu_s, row.step_ms] for row in rows]
    print(runner.markdown(header, lines))
    if overlap is not None:
        print(f"\ntotal / max(feed alone, arrays in memory) = {overlap:.2f}; the aim is {AIM}")
    by_name = {row.contestant: row for row in rows}
    ready, fed = by_name.get(READY), by_name.get(NAMES["fed"])
    if ready and fed and (cost := runner.ratio(ready.step_ms, fed.step_ms)):
        print(f"ready for restarts / fed by Spark, a step = {cost:.3f}; the aim is 1.01")
    print("\n".join(runner.failures(runs)))
    runner.write_json(
        parsed.json,
        rows,
        runs,
        overlap=overlap,
        data_rows=data.rows,
        epochs=parsed.epochs,
        hidden=parsed.hidden,
    )


if __name__ == "__main__":
    main()
