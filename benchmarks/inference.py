"""How many rows a second does `transform` score? The same network and rows, on the CPU.

Runs sparkdl, Spark's `predict_batch_udf`, TensorFlowOnSpark's `TFModel` and one process without
Spark, each in a process of its own, in turn, round after round, and prints medians. `README.md`
says what is measured and why so.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import runner
from runner import Figure, ratio, thousands

NAMES = {
    "limit": "limit: one process, Parquet and predict_on_batch",
    "sparkdl": "sparkdl TFModel, scores used",
    "kept": "sparkdl TFModel, all columns used",
    "udf": "predict_batch_udf",
    "tfos": "TensorFlowOnSpark 2.2.5 TFModel",
}
FEW = ("tfos",)
"""Who gets the smaller part of the data."""


@dataclass(frozen=True)
class Run:
    """What came of running one way once.

    Attributes:
        round: The number of the round; round 0 warms the machine up and does not count.
        load: The machine's one-minute load average just before.
        rates: Rows a second, of each pass.
        cpu_s: CPU seconds per million rows of all processes, of each pass.
    """

    contestant: str
    round: int
    load: float
    rates: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    error: str | None = None
    left_behind: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    contestant: str
    rate: Figure | None
    cpu_s: Figure | None


def summarise(runs: Sequence[Run]) -> list[Row]:
    """Return the rows of the table: figures over all passes of all rounds that count."""
    rows = []
    for name in dict.fromkeys(run.contestant for run in runs):
        counted = [run for run in runs if run.contestant == name and run.round]
        rate = Figure.of(value for run in counted for value in run.rates)
        rows.append(Row(name, rate, Figure.of(v for run in counted for v in run.cpu_s)))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    by_name = {row.contestant: row.rate for row in rows}
    header = ["median (min-max)", "rows/s", "of limit", "of predict_batch_udf"]
    lines = []
    for row in rows:
        ratios = [ratio(row.rate, by_name.get(NAMES[of])) for of in ("limit", "udf")]
        shown = [None if value is None else f"{value:.2f}" for value in ratios]
        cpu = row.cpu_s.show(thousands) if row.cpu_s else None
        rate = row.rate.show(thousands) if row.rate else "failed"
        lines.append([row.contestant, rate, *shown, cpu])
    return runner.markdown([*header, "CPU s per million rows"], lines)


def main() -> None:
    """Run the rounds, print the table and write the JSON."""
    parser = runner.options(__doc__, "inference", deadline_s=300)
    parser.add_argument("--rows", type=float, default=2, help="a factor on 160,000 rows")
    parser.add_argument("--passes", type=int, default=2, help="passes of a contestant that count")
    parser.add_argument("--batch", type=int, default=1024, help="rows that the model is given")
    parser.add_argument(
        "--data", type=Path, help="folder for data and model, kept; otherwise a temporary one"
    )
    parsed = parser.parse_args()
    kind = next(kind for kind in datasets.KINDS if kind.name == "wide")
    runs = []
    with ExitStack() as stack:
        folder = parsed.data or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-inference-"))
        )
        folder = folder.resolve()
        data, few = datasets.make(kind, folder, parsed.rows)
        code = "import infer, pathlib, sys; infer.make_model(pathlib.Path(sys.argv[1]))"
        contestants = runner.HERE / "contestants"
        subprocess.run([parsed.python, "-c", code, str(folder)], cwd=contestants, check=True)
        for number in range(parsed.repeats + 1):
            for mode, name in NAMES.items():
                if not parsed.only.search(name):
                    continue
                given = few if mode in FEW else data
                arguments = [
                    f"--{key}={getattr(given, key)}" for key in ("path", "files", "rows", "nbytes")
                ]
                arguments += [f"--epochs={parsed.passes}", f"--batch={parsed.batch}"]
                arguments += [f"--mode={mode}", f"--model={folder}"]
                outcome = runner.run(parsed.python, "infer.py", arguments, parsed.deadline_s)
                passes = outcome.events("pass")
                run = Run(
                    name,
                    number,
                    outcome.load,
                    [done["rows"] / done["seconds"] for done in passes],
                    [done["cpu_s"] / done["rows"] * 1e6 for done in passes],
                    outcome.error,
                    outcome.left_behind,
                )
                runs.append(run)
                result = ", ".join(map(thousands, run.rates)) or f"failed: {run.error}"
                print(f"round {number}: {name}: {result} rows/s", file=sys.stderr)
    rows = summarise(runs)
    print(table(rows))
    print("\n".join(runner.failures(runs)))
    runner.write_json(parsed.json, rows, runs, data_rows=data.rows, few_rows=few.rows)


if __name__ == "__main__":
    main()
