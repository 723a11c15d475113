"""What grows with the number of nodes, and what does not?

`control`: the driver, with simulated agents. `rows`: how the driver assigns the rows that simulated
agents hold. `nodes`: plain nodes as processes of this machine.

Each section is a function that runs its contestants, prints what comes of each, and returns the
rows of its table. `README.md` says what is measured and why so.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import runner
from runner import Figure

from sparkdl.node.context import NodeContext


@dataclass(frozen=True)
class Run:
    """What came of running one contestant once: its figures by name; see `launch.py`."""

    contestant: str
    nodes: int
    round: int
    load: float
    figures: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    left_behind: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """A row of a section's table: a number of nodes, and the figures by column."""

    section: str
    nodes: int
    figures: dict[str, Figure | None]


def control(parsed: argparse.Namespace, runs: list[Run]) -> list[Row]:
    """Measure the control plane: a real controller, and simulated agents on real connections."""
    columns: dict[str, Callable[[dict[str, dict[str, Any]]], float]] = {
        "gathered, s": lambda of: of["gathered"]["s"],
        "of it CPU, s": lambda of: of["gathered"]["cpu_s"],
        "gathering, MB": lambda of: of["gathered"]["nbytes"] / 1e6,
        "idle, cores": lambda of: of["idle"]["cores"],
        "idle, kB/s": lambda of: of["idle"]["nbytes"] / 1e3,
        "reporting, cores": lambda of: of["reporting"]["cores"],
        "reporting, kB/s": lambda of: of["reporting"]["nbytes"] / 1e3,
        "resident, MB": lambda of: of["memory"]["nbytes"] / 1e6,
        "loss decided, s": lambda of: of["lost"]["decided_s"],
        "all told, s": lambda of: of["lost"]["told_s"],
    }
    mine = []
    for number in range(1, parsed.repeats + 1):
        for nodes in parsed.nodes or SIZES["control"]:
            outcome = runner.run(
                parsed.python,
                "control_driver.py",
                [f"--nodes={nodes}", f"--seconds={parsed.seconds:g}"],
                parsed.deadline_s,
            )
            events = {record["event"]: record for record in outcome.records}
            figures = (
                {name: figure(events) for name, figure in columns.items()}
                if not outcome.error
                else {}
            )
            mine.append(
                Run(
                    *("control", nodes, number, outcome.load, figures),
                    error=outcome.error,
                    left_behind=outcome.left_behind,
                )
            )
            result = outcome.error or f"gathered in {figures['gathered, s']:.2f} s"
            print(f"round {number}: control, {nodes} agents: {result}", file=sys.stderr)
    runs += mine
    return [
        Row(
            "control",
            nodes,
            {
                name: Figure.of(run.figures.get(name) for run in mine if run.nodes == nodes)
                for name in columns
            },
        )
        for nodes in parsed.nodes or SIZES["control"]
    ]


# nodes, for real


def count(args: object, ctx: NodeContext) -> int:
    """Read one epoch."""
    return sum(len(batch["x"]) for batch in ctx.batches(1024, even=True))


def nodes(num_nodes: int) -> dict[str, float]:
    """Launch plain nodes as processes of this machine, feed them an epoch, end them."""
    import pyarrow as pa

    import sparkdl

    rows = 1_000 * num_nodes
    parts = [pa.table({"x": range(rows // 8)}) for _ in range(8)]
    began_s = time.monotonic()
    options = {"framework": "plain", "executor": "local"}
    with sparkdl.launch(None, count, nodes=num_nodes, **options) as cluster:  # type: ignore[arg-type]
        launched_s = time.monotonic()
        report = cluster.feed(parts)
        fed_s = time.monotonic()
        assert sum(cluster.results(600)) == rows
    ended_s = time.monotonic()
    return {
        "to launch, s": round(launched_s - began_s, 1),
        "to feed, s": round(fed_s - launched_s, 1),
        "to end, s": round(ended_s - fed_s, 1),
        "rows apart": max(report.rows.values()) - min(report.rows.values()),
    }


def alone(
    name: str, measure: Callable[[int], dict[str, float]], parsed: argparse.Namespace
) -> list[Row]:
    """Measure each number of nodes once, in this process."""
    rows = []
    for count in parsed.nodes or SIZES[name]:
        print(f"{name}: {count} nodes", file=sys.stderr)
        figures = {column: Figure.of([value]) for column, value in measure(count).items()}
        rows.append(Row(name, count, figures))
    return rows


SIZES = {
    "control": (10, 50, 200),
    "rows": (10, 50, 200),
    "nodes": (2, 16, 64, 128),
}


def rows(nodes: int) -> dict[str, float]:
    """Assign rows of so many simulated agents."""
    from contestants.row_table import Feeding

    return Feeding(nodes).run()


SECTIONS: dict[str, Callable[[argparse.Namespace, list[Run]], list[Row]]] = {
    "control": control,
    "rows": lambda parsed, runs: alone("rows", rows, parsed),
    "nodes": lambda parsed, runs: alone("nodes", nodes, parsed),
}


def table(rows: Sequence[Row]) -> str:
    """Return the medians of one section as a Markdown table."""
    lines = [
        [
            f"{row.nodes:,}",
            *(f"{figure.median:.3g}" if figure else None for figure in row.figures.values()),
        ]
        for row in rows
    ]
    return runner.markdown([f"{rows[0].section}: nodes", *rows[0].figures], lines)


def numbers(text: str) -> list[int]:
    """Return the numbers of a list with commas."""
    return [int(number) for number in text.split(",")]


def main() -> None:
    """Run the sections, print their tables and write the JSON."""
    parser = runner.options(__doc__, "scale", deadline_s=600)
    parser.set_defaults(python=sys.executable, repeats=1)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="with commas")
    parser.add_argument("--nodes", type=numbers, help="with commas, in place of each section's own")
    parser.add_argument("--seconds", type=float, default=15.0, help="for each load of `control`")
    parsed = parser.parse_args()
    rows: list[Row] = []
    runs: list[Run] = []
    for name in parsed.sections.split(","):
        found = SECTIONS[name](parsed, runs)
        print(table(found), end="\n\n")
        rows += found
    print("\n".join(runner.failures(runs)))
    runner.write_json(parsed.json, rows, runs)


if __name__ == "__main__":
    main()
