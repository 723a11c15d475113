"""How long does a user wait for a model, from the start of the program to scored test rows?

Runs the same training by sparkdl, by its peers and by one process without Spark, each in a process
of its own, in turn, round after round; prints seconds by phase, and draws them. `README.md` says
what is measured and why so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import runner
from runner import Figure

CONTESTANTS = {
    "sparkdl, Keras": ("job_sparkdl.py", "--framework=keras"),
    "sparkdl, Keras, files": ("job_sparkdl.py", "--framework=keras", "--source=parquet"),
    "TensorFlowOnSpark, Keras": ("job_tfos.py",),
    "one process, Keras": ("job_alone.py", "--framework=keras"),
    "sparkdl, PyTorch": ("job_sparkdl.py", "--framework=torch"),
    "sparkdl, PyTorch, files": ("job_sparkdl.py", "--framework=torch", "--source=parquet"),
    "TorchDistributor, files": ("job_torch_distributor.py",),
    "one process, PyTorch": ("job_alone.py", "--framework=torch"),
}


@dataclass(frozen=True)
class Run:
    """What came of one job; see `launch.py`.

    Attributes:
        phases: Seconds by phase.
        cpu_s: CPU seconds of all its processes.
        memory: The most memory of all its processes together, in bytes; shared pages count once.
        accuracy: On the test rows.
    """

    contestant: str
    round: int
    load: float
    phases: dict[str, float] = field(default_factory=dict)
    cpu_s: float | None = None
    memory: int | None = None
    accuracy: float | None = None
    error: str | None = None
    left_behind: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """A contestant's line of the table."""

    contestant: str
    seconds: Figure | None
    phases: dict[str, Figure | None]
    cpu_s: Figure | None
    memory: Figure | None
    accuracy: Figure | None


def summarise(runs: Sequence[Run]) -> list[Row]:
    """Return a row for each contestant."""
    phases = dict.fromkeys(phase for run in runs for phase in run.phases)
    rows = []
    for name in dict.fromkeys(run.contestant for run in runs):
        mine = [run for run in runs if run.contestant == name and run.round]
        rows.append(
            Row(
                name,
                Figure.of(sum(run.phases.values()) for run in mine if run.phases),
                {phase: Figure.of(run.phases.get(phase) for run in mine) for phase in phases},
                Figure.of(run.cpu_s for run in mine),
                Figure.of(run.memory for run in mine),
                Figure.of(run.accuracy for run in mine),
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    phases = rows[0].phases if rows else {}
    header = ["seconds, median", "in all (min-max)", *phases, "CPU s", "GB", "accuracy"]
    lines = [
        [
            row.contestant,
            row.seconds and row.seconds.show(lambda value: f"{value:.1f}"),
            *(_show(row.phases[phase]) for phase in phases),
            _show(row.cpu_s),
            _show(row.memory, 1e-9, 2),
            _show(row.accuracy, digits=3),
        ]
        for row in rows
    ]
    return runner.markdown(header, lines)


def _show(figure: Figure | None, factor: float = 1.0, digits: int = 1) -> str | None:
    return None if figure is None else f"{figure.median * factor:.{digits}f}"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw a bar for each contestant, of its phases one after another."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "sparkdl"  # the same figures give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    there = [row for row in rows if row.seconds][::-1]
    starts = [0.0] * len(there)
    for phase in rows[0].phases if rows else ():
        lengths = [found.median if (found := row.phases[phase]) else 0.0 for row in there]
        axes.barh([row.contestant for row in there], lengths, left=starts, label=phase)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    axes.set(xlabel="seconds")
    axes.legend(fontsize="small", ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Run the rounds, print the table, draw the plot and write the JSON."""
    parser = runner.options(__doc__, "job", deadline_s=1800)
    parser.add_argument("--rounds", dest="repeats", type=int, help="the same as --repeats")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds before, that do not count")
    parser.add_argument("--rows", type=int, default=60_000, help="of the training data")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--data", type=Path, default=runner.ROOT / "out" / "data")
    parser.add_argument("--plot", type=Path, default=runner.ROOT / "out" / "job.svg")
    parsed = parser.parse_args()
    train, test = datasets.make_digits(parsed.data, parsed.rows)
    runs: list[Run] = []
    for number in range(1 - parsed.warm_up, parsed.repeats + 1):
        chosen = [name for name in CONTESTANTS if parsed.only.search(name)]
        runs += [_run(parsed, name, number, train, test) for name in chosen]
    rows = summarise(runs)
    print(table(rows))
    print(f"\n{train.rows} rows, {parsed.epochs} epochs, {test.rows} test rows; two nodes.")
    print("\n".join(runner.failures(runs)))
    plot(rows, parsed.plot)
    runner.write_json(parsed.json, rows, runs, rows_of_data=train.rows, epochs=parsed.epochs)


def _run(parsed: Any, name: str, number: int, train: Any, test: Any) -> Run:
    program, *arguments = CONTESTANTS[name]
    arguments += [f"--train={train.path}", f"--test={test.path}", f"--epochs={parsed.epochs}"]
    if program == "job_tfos.py":
        arguments += [f"--rows={train.rows}"]
    outcome = runner.run(parsed.python, program, arguments, parsed.deadline_s)
    done = next(iter(outcome.events("job")), {})
    seconds = sum(done["seconds"].values()) if done else 0.0
    result = outcome.error or f"{seconds:.1f} s, accuracy {done['accuracy']:.3f}"
    print(f"round {number}: {name}: {result}", file=sys.stderr)
    return Run(
        *(name, number, outcome.load, done.get("seconds", {}), done.get("cpu_s")),
        *(done.get("memory"), done.get("accuracy"), outcome.error, outcome.left_behind),
    )


if __name__ == "__main__":
    main()
