"""What does an all-reduce cost, by sparkdl and by the bare collectives below it?

Runs each way in processes of its own, in turn, round after round, and prints a table of medians for
each number of ranks. `README.md` says what is measured and why so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import runner
from runner import Figure

NAMES = {
    "gloo": "torch.distributed, gloo",
    "ring": "TensorFlow's ring",
    "group": "sparkdl's group",
    "torch": "sparkdl.horovod.torch",
    "tensorflow": "sparkdl.horovod.tensorflow",
}
SIZES = (1 << 10, 64 << 10, 1 << 20, 10 << 20, 25 << 20, 100 << 20)


@dataclass(frozen=True)
class Run:
    """What came of running one way once: seconds by bytes, and bare gloo's; see `launch.py`."""

    contestant: str
    ranks: int
    round: int
    load: float
    seconds: dict[int, float] = field(default_factory=dict)
    bare: dict[int, float] = field(default_factory=dict)
    error: str | None = None
    left_behind: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """A cell of the table: one way, one size.

    Attributes:
        ratio: to bare gloo in the same processes, the median over the rounds.
    """

    contestant: str
    ranks: int
    nbytes: int
    seconds: Figure | None
    ratio: Figure | None


def summarise(runs: Sequence[Run]) -> list[Row]:
    """Return a row for each way, number of ranks and size."""
    rows = []
    for name, ranks in dict.fromkeys((run.contestant, run.ranks) for run in runs):
        mine = [run for run in runs if (run.contestant, run.ranks) == (name, ranks) and run.round]
        for nbytes in SIZES:
            times = Figure.of(run.seconds.get(nbytes) for run in mine)
            ratios = Figure.of(
                run.seconds[nbytes] / run.bare[nbytes] for run in mine if nbytes in run.seconds
            )
            rows.append(Row(name, ranks, nbytes, times, ratios))
    return rows


def size(nbytes: int) -> str:
    """Return a number of bytes for a table."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def table(rows: Sequence[Row], ranks: int) -> str:
    """Return the milliseconds, and the ratios to bare gloo, as a Markdown table."""
    mine = [row for row in rows if row.ranks == ranks]
    header = [f"{ranks} ranks: ms (times gloo's)", *map(size, SIZES)]
    lines = []
    for name in dict.fromkeys(row.contestant for row in mine):
        cells: list[object] = [name]
        for row in mine:
            if row.contestant == name:
                known = row.seconds and row.ratio
                cells.append(
                    f"{row.seconds.median * 1e3:.2f} ({row.ratio.median:.2f})" if known else None
                )
        lines.append(cells)
    return runner.markdown(header, lines)


def main() -> None:
    """Run the rounds, print the tables and write the JSON."""
    parser = runner.options(__doc__, "allreduce", deadline_s=300)
    parser.set_defaults(python=sys.executable)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parsed = parser.parse_args()
    runs = []
    for number in range(parsed.repeats + 1):
        for ranks in parsed.ranks:
            for way, name in NAMES.items():
                if not parsed.only.search(name):
                    continue
                arguments = [f"--way={way}", f"--ranks={ranks}", "--sizes", *map(str, SIZES)]
                outcome = runner.run(parsed.python, "allreduce.py", arguments, parsed.deadline_s)
                sizes = outcome.events("size")
                seconds = {one["nbytes"]: one["seconds"] for one in sizes}
                bare = {one["nbytes"]: one["bare_seconds"] for one in sizes}
                runs.append(
                    Run(
                        *(name, ranks, number, outcome.load, seconds, bare),
                        error=outcome.error,
                        left_behind=outcome.left_behind,
                    )
                )
                result = outcome.error or f"{seconds.get(25 << 20, 0) * 1e3:.1f} ms for 25 MiB"
                print(f"round {number}: {ranks} ranks: {name}: {result}", file=sys.stderr)
    rows = summarise(runs)
    for ranks in parsed.ranks:
        print(table(rows, ranks), end="\n\n")
    print("\n".join(runner.failures(runs)))
    runner.write_json(parsed.json, rows, runs)


if __name__ == "__main__":
    main()
