"""How many rows per second reach numpy batches in the nodes, and what does it cost?

Runs sparkdl, TensorFlowOnSpark and the limits in turn on each data set, and prints medians;
`README.md` has the method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import runner
from datasets import DataSet
from runner import Contestant, Figure, Result

NODES = 2
COLD, FIRST, LATER = "cold", "first", "later"
TFOS = "TensorFlowOnSpark 2.2.5"
WAYS = {
    TFOS: {"way": "tfos"},
    "drain": {"way": "drain"},
    "sparkdl": {"way": "sparkdl"},
    "bare loop": {"way": "bare"},
    "sparkdl, Parquet": {"way": "sparkdl", "source": "parquet"},
    "sparkdl, nodes read": {"way": "sparkdl", "source": "nodes"},
    "in order": {"way": "sparkdl", "in_order": True},
    "in order, nodes read": {"way": "sparkdl", "source": "nodes", "in_order": True},
    "shuffled": {"way": "sparkdl", "source": "nodes", "shuffle": "global"},
    "shuffled in order": {
        "way": "sparkdl",
        "source": "nodes",
        "shuffle": "global",
        "in_order": True,
    },
    "scan": {"way": "scan"},
    "scan, touched": {"way": "scan", "touch": True},
}


@dataclass(frozen=True)
class Row:
    """A line of the table: epochs of a contestant, and the row of their limit.

    Attributes:
        epochs: `COLD` for that of the first feed of all, `FIRST` for the first of the next feed,
            `LATER` for those after it.
    """

    name: str
    contestant: str
    epochs: str
    limit: Row | None = None

    def of(self, results: Sequence[Result]) -> list[list[dict[str, Any]]]:
        """Return the epochs of each round that counts, if it has any."""
        event = "cold" if self.epochs == COLD else "epoch"
        which = slice(1, None) if self.epochs == LATER else slice(1)
        found = [
            [record for record in one.records if record["event"] == event][which]
            for one in results
            if one.contestant.name == self.contestant and one.round > 0
        ]
        return [epochs for epochs in found if epochs]


DRAINED = Row("drain: limit of a first epoch", "drain", FIRST)
LOOPED = Row("bare loop: limit of later epochs", "bare loop", LATER)
FIRST_SCAN = Row("scan, touched, first pass: limit of a first feed", "scan, touched", FIRST)
SCANNED = Row("scan, touched: limit of Parquet", "scan, touched", LATER)
FREE = Row("sparkdl, first epoch", "sparkdl", FIRST, DRAINED)
FREE_LATER = Row("sparkdl, later epochs", "sparkdl", LATER, LOOPED)
FREE_SCAN = Row("nodes read, first epoch", "sparkdl, nodes read", FIRST, SCANNED)
SHUFFLED = Row("nodes read, shuffled, later epochs", "shuffled", LATER, LOOPED)
ROWS = (
    Row(TFOS, TFOS, FIRST),
    DRAINED,
    Row("sparkdl, first epoch of the first feed", "sparkdl", COLD, DRAINED),
    FREE,
    LOOPED,
    FREE_LATER,
    Row("scan, nothing touched", "scan", LATER),
    FIRST_SCAN,
    SCANNED,
    Row("nodes read, first epoch of the first feed", "sparkdl, nodes read", COLD, FIRST_SCAN),
    FREE_SCAN,
    Row("nodes read, later epochs", "sparkdl, nodes read", LATER, LOOPED),
    Row("from Parquet, first epoch", "sparkdl, Parquet", FIRST, SCANNED),
    Row("from Parquet, later epochs", "sparkdl, Parquet", LATER, LOOPED),
    Row("in a fixed order, first epoch", "in order", FIRST, FREE),
    Row("in a fixed order, later epochs", "in order", LATER, FREE_LATER),
    Row("in a fixed order, nodes read, first epoch", "in order, nodes read", FIRST, FREE_SCAN),
    SHUFFLED,
    Row("in a fixed order, shuffled", "shuffled in order", LATER, SHUFFLED),
)


def table(data: DataSet, few: DataSet, results: Sequence[Result]) -> runner.Table:
    """Return the rows of one data set; a row without results is included."""
    speeds: dict[Row, Figure | None] = {}
    rows: dict[str, dict[str, runner.Cell]] = {}
    for row in ROWS:
        source = few if row.contestant == TFOS else data
        width = source.nbytes / source.rows
        rounds = row.of(results)
        each = [median(one["rows"] / one["seconds"] for one in epochs) for epochs in rounds]
        cpu_s = [median(one["cpu_s"] * 1e6 / one["rows"] for one in epochs) for epochs in rounds]
        firsts = [epochs[0]["first_s"] for epochs in rounds if epochs[0]["first_s"] > 0]
        speeds[row] = speed = Figure.of(each)
        rows[row.name] = {
            "rows/s": speed,
            "MB/s": Figure.of(one * width / 1e6 for one in each),
            "CPU s per million rows": Figure.of(cpu_s),
            "first row, s": None if row.epochs == LATER else Figure.of(firsts),
            "of limit": runner.ratio(speed, speeds[row.limit]) if row.limit else None,
            "of TensorFlowOnSpark": runner.ratio(speed, speeds[ROWS[0]]) if row.limit else None,
        }
    return rows


def main() -> None:
    parser = runner.options(__doc__, deadline_s=300)
    add = parser.add_argument
    add("--rows", type=float, default=1.0, help="factor for the rows of every data set")
    add("--epochs", type=int, default=4, help="epochs of a feed, at least 2")
    add("--data", type=Path, help="folder that keeps the data; default: a temporary one")
    add("--sets", default=",".join(datasets.KINDS), help="comma-separated data sets")
    parsed = parser.parse_args()

    with runner.data_folder(parsed.data) as folder:
        made = {
            name: datasets.make(name, folder, parsed.rows)
            for name in datasets.KINDS
            if name in parsed.sets.split(",")
        }

        def arguments(one: Contestant, before: list[Result]) -> dict[str, Any]:
            data, few = made[one.data]
            # A node gets its share of each Spark batch; the bare loop uses batches of that size.
            same = [done for done in before if done.contestant.data == one.data]
            most = [rows for done in same for rows in done.values("batches", "rows")] or [10_000]
            of_loop = {"segment_rows": max(1, most[-1] // NODES), "epochs": parsed.epochs}
            return vars(few if one.name == TFOS else data) | of_loop

        wanted = runner.wanted(parsed, "feeding.py", WAYS)
        contestants = [replace(one, data=data) for data in made for one in wanted]
        results = runner.in_turn(parsed, contestants, arguments, ("epoch", "seconds"))
    tables: dict[str, runner.Table] = {}
    for name, both in made.items():
        mine = [one for one in results if one.contestant.data == name]
        tables[f"{name}: median (min-max)"] = table(*both, mine)
    runner.report(parsed, tables, results, sets=made, epochs=parsed.epochs)


if __name__ == "__main__":
    main()
