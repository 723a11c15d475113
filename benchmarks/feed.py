"""How many rows a second get from Spark into numpy batches in the nodes, and what does it cost?

Runs sparkdl, TensorFlowOnSpark and the limits, each in a process of its own, in turn, round after
round, on each set of data, and prints a table of medians for each. `README.md` says what is
measured and why so.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import runner
from datasets import DataSet
from runner import Figure, thousands

NODES = 2
COLD, FIRST, LATER = "cold", "first", "later"


@dataclass(frozen=True)
class Contestant:
    """A program to run.

    Attributes:
        on_few: Whether it gets the smaller part of the data.
    """

    name: str
    program: str
    arguments: tuple[str, ...] = ()
    on_few: bool = False


@dataclass(frozen=True)
class Column:
    """A figure: some epochs of a contestant, and the figure that is its limit.

    Attributes:
        epochs: `COLD` for that of the first feed of all, `FIRST` for the first of the next feed,
            `LATER` for those after it.
    """

    name: str
    contestant: str
    epochs: str
    limit: Column | None = None


TFOS = Contestant("TensorFlowOnSpark 2.2.5", "feed_tfos.py", on_few=True)
DRAIN = Contestant("drain", "feed_drain.py")
OURS = Contestant("sparkdl", "feed_sparkdl.py")
BARE = Contestant("bare loop", "feed_bare.py")
PARQUET = Contestant("sparkdl, Parquet", "feed_sparkdl.py", ("--source", "parquet"))
NODES_READ = Contestant("sparkdl, nodes read", "feed_sparkdl.py", ("--source", "nodes"))
SCAN = Contestant("scan", "feed_scan.py")
TOUCH = Contestant("scan, touched", "feed_scan.py", ("--touch",))
MEMORY = Contestant("sparkdl, memory", "feed_sparkdl.py", ("--memory",))
CONTESTANTS = (TFOS, DRAIN, OURS, BARE, PARQUET, NODES_READ, SCAN, TOUCH, MEMORY)
DRAINED = Column("drain: limit of a first epoch", DRAIN.name, FIRST)
LOOPED = Column("bare loop: limit of later epochs", BARE.name, LATER)
FIRST_SCAN = Column("scan, touched, first pass: limit of a first feed", TOUCH.name, FIRST)
SCANNED = Column("scan, touched: limit of Parquet", TOUCH.name, LATER)
COLUMNS = (
    Column("TensorFlowOnSpark 2.2.5", TFOS.name, FIRST),
    DRAINED,
    Column("sparkdl, first epoch of the first feed", OURS.name, COLD, DRAINED),
    Column("sparkdl, first epoch", OURS.name, FIRST, DRAINED),
    LOOPED,
    Column("sparkdl, later epochs", OURS.name, LATER, LOOPED),
    Column("scan, nothing touched", SCAN.name, LATER),
    FIRST_SCAN,
    SCANNED,
    Column("sparkdl, nodes read, first epoch of the first feed", NODES_READ.name, COLD, FIRST_SCAN),
    Column("sparkdl, nodes read, first epoch", NODES_READ.name, FIRST, SCANNED),
    Column("sparkdl, nodes read, later epochs", NODES_READ.name, LATER, LOOPED),
    Column("sparkdl from Parquet, first epoch", PARQUET.name, FIRST, SCANNED),
    Column("sparkdl from Parquet, later epochs", PARQUET.name, LATER, LOOPED),
)


@dataclass(frozen=True)
class Epoch:
    """One epoch of one run, over all nodes."""

    number: int
    seconds: float
    cpu_s: float
    rows: int
    nbytes: int
    first_s: float


@dataclass(frozen=True)
class Run:
    """What came of running one contestant on one set of data once.

    Attributes:
        round: The number of the round; round 0 warms the machine up and does not count.
        load: The machine's one-minute load average just before.
        memory: What was seen of the nodes' memory, for the contestant that is about that.
    """

    data: str
    contestant: str
    round: int
    load: float
    epochs: list[Epoch] = field(default_factory=list)
    cold: list[Epoch] = field(default_factory=list)
    memory: dict[str, Any] | None = None
    error: str | None = None
    left_behind: list[str] = field(default_factory=list)

    def of(self, column: Column) -> list[Epoch]:
        """Return the epochs that count for a column, none unless this is its contestant."""
        if self.contestant != column.contestant or not self.round:
            return []
        epochs = {COLD: self.cold, FIRST: self.epochs[:1], LATER: self.epochs[1:]}
        return epochs[column.epochs]


@dataclass(frozen=True)
class Row:
    """A line of a table.

    Attributes:
        rows_s: Rows a second.
        mb_s: Millions of bytes a second, of the rows as Arrow arrays.
        cpu_s: CPU seconds, user and system, of all the contestant's processes, per million rows.
        first_s: Seconds from the call to the first batch of any node, of a first epoch.
        of_limit: Rows a second over the limit's, medians.
        of_tfos: The same over TensorFlowOnSpark's.
    """

    data: str
    name: str
    rows_s: Figure | None
    mb_s: Figure | None
    cpu_s: Figure | None
    first_s: Figure | None = None
    of_limit: float | None = None
    of_tfos: float | None = None


def run(
    contestant: Contestant, data: DataSet, number: int, more: Sequence[str], parsed: Any
) -> tuple[Run, int]:
    """Run one contestant once; return also the rows of Spark's largest batch, 0 if unknown."""
    arguments = [f"--{key}={getattr(data, key)}" for key in ("path", "files", "rows", "nbytes")]
    arguments += [f"--epochs={parsed.epochs}", *contestant.arguments, *more]
    outcome = runner.run(parsed.python, contestant.program, arguments, parsed.deadline_s)
    epochs, cold = (
        [
            Epoch(**{key: record[key] for key in Epoch.__dataclass_fields__})
            for record in outcome.events(event)
        ]
        for event in ("epoch", "cold")
    )
    done = Run(
        data.name,
        contestant.name,
        number,
        outcome.load,
        epochs,
        cold,
        next(iter(outcome.events("memory")), None),
        outcome.error,
        outcome.left_behind,
    )
    return done, max((record["rows"] for record in outcome.events("batches")), default=0)


def rounds(
    contestants: Sequence[Contestant], made: Sequence[tuple[DataSet, DataSet]], parsed: Any
) -> Iterator[Run]:
    """Run everything, round after round."""
    most: dict[str, int] = {}  # rows of Spark's batches, by data: a node gets its share of each
    for number in range(parsed.repeats + 1):
        for data, few in made:
            for contestant in contestants:
                more = []
                if contestant is BARE and most.get(data.name):
                    more = [f"--segment-rows={max(1, most[data.name] // NODES)}"]
                done, rows = run(
                    contestant, few if contestant.on_few else data, number, more, parsed
                )
                most[data.name] = rows or most.get(data.name, 0)
                every = [*done.cold, *done.epochs]
                seconds = ", ".join(f"{epoch.seconds:.2f} s" for epoch in every)
                result = f"failed: {done.error}" if done.error else seconds or "done"
                print(f"round {number}: {data.name}: {done.contestant}: {result}", file=sys.stderr)
                yield done


def summarise(data: DataSet, few: DataSet, runs: Sequence[Run]) -> list[Row]:
    """Return a row for each figure on one set of data; one that there is not has a row too."""
    rows: dict[str, Row] = {}
    for column in COLUMNS:
        source = few if column.contestant == TFOS.name else data
        width = source.nbytes / source.rows
        epochs = [epochs for run in runs if run.data == data.name and (epochs := run.of(column))]
        speeds = [median(epoch.rows / epoch.seconds for epoch in one) for one in epochs]
        row = Row(
            data.name,
            column.name,
            Figure.of(speeds),
            Figure.of(speed * width / 1e6 for speed in speeds),
            Figure.of(median(epoch.cpu_s * 1e6 / epoch.rows for epoch in one) for one in epochs),
        )
        if column.epochs != LATER:
            firsts = [one[0].first_s for one in epochs if one[0].first_s > 0]
            row = replace(row, first_s=Figure.of(firsts))
        if column.limit:
            limit, tfos = rows[column.limit.name].rows_s, rows[COLUMNS[0].name].rows_s
            row = replace(
                row,
                of_limit=runner.ratio(row.rows_s, limit),
                of_tfos=runner.ratio(row.rows_s, tfos),
            )
        rows[column.name] = row
    return list(rows.values())


def table(data: DataSet, rows: Sequence[Row]) -> str:
    """Return one set's rows as a Markdown table."""
    header = [
        f"{data.name}: median (min-max)",
        "rows/s",
        "MB/s",
        "CPU s per million rows",
        "first row, s",
        "of limit",
        "of TensorFlowOnSpark",
    ]
    lines = [
        [
            row.name,
            *(
                figure and figure.show(thousands)
                for figure in (row.rows_s or Missing(), row.mb_s, row.cpu_s)
            ),
            row.first_s and row.first_s.show("{:.2f}".format),
            row.of_limit and f"{row.of_limit:.2f}",
            row.of_tfos and f"{row.of_tfos:.1f}",
        ]
        for row in rows
    ]
    return runner.markdown(header, lines)


class Missing:
    """Takes the place of a figure where every run failed."""

    def show(self, _form: object) -> str:
        """Say so."""
        return "none"


def memory_table(runs: Sequence[Run]) -> str:
    """Return what was seen of the nodes' memory: of each run the largest node, then medians."""
    header = [
        "memory, MB: median (min-max)",
        "budget",
        "received by a node",
        "segments held",
        "agent RSS before",
        "agent RSS peak",
        "agent PSS peak",
        "child RSS before",
        "child RSS peak",
        "child PSS peak",
    ]
    lines = []
    for data in dict.fromkeys(run.data for run in runs):
        seen = [run.memory for run in runs if run.data == data and run.memory and run.round]
        if not seen:
            continue
        columns = [
            [one["budget"] for one in seen],
            [one["budget"] * 10 for one in seen],
            [max(one["segments"], default=0) for one in seen],
        ]
        columns += [
            [max((peaks[key] for peaks in one[who]), default=0) for one in seen]
            for who in ("agents", "children")
            for key in ("rss_before", "rss", "pss")
        ]
        figures = [Figure.of(value / 1e6 for value in column) for column in columns]
        lines.append([data, *(figure and figure.show(thousands) for figure in figures)])
    return runner.markdown(header, lines) if lines else ""


def main() -> None:
    """Run the rounds, print the tables and write the JSON."""
    parser = runner.options(__doc__, "feed", deadline_s=300)
    parser.add_argument(
        "--rows", type=float, default=1.0, help="a factor on the number of rows of every set"
    )
    parser.add_argument("--epochs", type=int, default=4, help="epochs of a feed, at least 2")
    parser.add_argument(
        "--data", type=Path, help="folder for the data, kept; otherwise a temporary one"
    )
    names = [kind.name for kind in datasets.KINDS]
    parser.add_argument(
        "--sets", default=",".join(names), help="which sets of data, with commas between"
    )
    parsed = parser.parse_args()
    contestants = [one for one in CONTESTANTS if parsed.only.search(one.name)]
    with ExitStack() as stack:
        folder = parsed.data or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-feed-"))
        )
        made = [
            datasets.make(kind, folder.resolve(), parsed.rows)
            for kind in datasets.KINDS
            if kind.name in parsed.sets.split(",")
        ]
        runs = list(rounds(contestants, made, parsed))
    rows = []
    for data, few in made:
        found = summarise(data, few, runs)
        rows += found
        print(table(data, found) + "\n")
    print("\n".join(filter(None, [memory_table(runs), *runner.failures(runs)])))
    sizes = [
        {"name": one.name, "rows": one.rows, "nbytes": one.nbytes} for pair in made for one in pair
    ]
    runner.write_json(parsed.json, rows, runs, sets=sizes, epochs=parsed.epochs)


if __name__ == "__main__":
    main()
