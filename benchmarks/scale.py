"""What grows with the number of nodes, and what does not?

`control`: the driver, with simulated agents. `plan`: feeders, their groups and books, and the rows
that nodes pass on, with the code that runs in a cluster, on simulated time. `nodes`: plain nodes as
processes of this machine.

Each section is a function that runs its contestants, prints what comes of each, and returns the
rows of its table. `README.md` says what is measured and why so.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import runner
from runner import Figure

from sparkdl.feed.store.store import NodeStore, StoreLimits
from sparkdl.feed.transfer import groups
from sparkdl.feed.transfer.balance import transfers
from sparkdl.feed.transfer.groups import Groups
from sparkdl.feed.transfer.messages import FeedSpec, PlanRequest, PutHeader, Question, Target
from sparkdl.feed.transfer.server import answer
from sparkdl.node.context import NodeContext

NODES_A_HOST = 4
PARTITIONS_A_NODE = 2
ROW_NBYTES = 3 * 1024
BATCH_ROWS = (32 << 20) // ROW_NBYTES
PARTITION_ROWS = 4 * BATCH_ROWS
FEEDER_NBYTES_S = 100e6
"""What a Spark task brings in a second."""


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


# feeding, simulated


@dataclass
class Agents:
    """The agents of all nodes: their books are real, their rows are counted.

    Attributes:
        asked: questions by node and second.
        rows: planned for each node.
    """

    targets: Sequence[Target]
    now_s: float = 0.0
    asked: Counter[tuple[int, int]] = field(default_factory=Counter)
    nbytes: int = 0
    rows: Counter[int] = field(default_factory=Counter)
    _stores: dict[int, NodeStore] = field(default_factory=dict)

    def ask(self, target: Target, question: Question) -> bytes:
        """Answer as the agent does; a store is made where one is asked."""
        store = self._stores.get(target.node_id)
        if store is None:
            limits = StoreLimits(1 << 30)
            store = NodeStore(limits, 600.0, lambda segment: None, lambda feed: None)
            self._stores[target.node_id] = store
        self.asked[target.node_id, int(self.now_s)] += 1
        said = json.dumps(answer(store, question)).encode()  # type: ignore[arg-type]
        self.nbytes += len(said) + len(msgspec.json.encode(question))
        return said


class SimulatedGroups(Groups):
    """A feeder's groups, whose agents are simulated."""

    agents: Agents

    def _ask(self, target: Target, question: Question) -> bytes:
        return self.agents.ask(target, question)


class SimulatedFeeder:
    """Feeds one partition after the other, as `Feeder` does where all nodes have room."""

    def __init__(self, agents: Agents, spec: FeedSpec, sizes: Sequence[tuple[int, int]]) -> None:
        self.visits: list[int] = []
        self._agents, self._spec, self._sizes = agents, spec, list(sizes)
        self._groups: SimulatedGroups | None = None
        self._group = -1
        self._left = 0

    def step(self, host: str) -> float | None:
        """Send a batch; return how many seconds it takes, `None` once all is sent."""
        while not self._left:
            if not self._sizes:
                return None
            partition, self._left = self._sizes.pop()
            header = PutHeader(self._spec.feed, 0, self._spec.run, partition)
            self._groups = SimulatedGroups(self._spec, header)
            self._groups.agents = self._agents
            self._group = self._groups.first(lambda address: address == host)
            self._groups.visit(self._group)
            self.visits.append(1)
        assert self._groups is not None
        rows = min(BATCH_ROWS, self._left)
        if len(self._groups.groups) > 1:
            here = self._groups.groups[self._group]
            group = self._groups.lower(self._group, rows / len(here))
            if group != self._group:
                self._group = group
                self._groups.visit(group)
                self.visits[-1] += 1
        here = self._groups.groups[self._group]
        ids = tuple(target.node_id for target in here)
        request = PlanRequest(self._spec.feed, 0, 0, rows, ids)
        shares = json.loads(self._agents.ask(here[0], request))
        self._agents.rows.update(dict(zip(ids, shares, strict=True)))
        self._left -= rows
        return rows * ROW_NBYTES / FEEDER_NBYTES_S


def plan(num_nodes: int, grouped: Callable[..., Any] = groups.grouped) -> dict[str, float]:
    """Feed an epoch to so many nodes: a feeder a node, partitions of uneven sizes."""
    mix = random.Random(num_nodes)
    targets = [
        Target(n, f"worker:{n}", f"grpc://10.0.{n // NODES_A_HOST}:9000") for n in range(num_nodes)
    ]
    agents, made = Agents(targets), grouped(targets)
    groups.grouped = lambda targets: made  # each feeder finds the same; here once is enough
    spec = FeedSpec("input", 0, "run", tuple(targets), "token")
    sizes = [
        (p, int(PARTITION_ROWS * mix.lognormvariate(0, 0.5)))
        for p in range(num_nodes * PARTITIONS_A_NODE)
    ]
    feeders = [SimulatedFeeder(agents, spec, sizes[n::num_nodes]) for n in range(num_nodes)]
    order = [(mix.random(), n) for n in range(num_nodes)]
    heapq.heapify(order)
    end_s, began_s = 0.0, time.process_time()
    while order:
        agents.now_s, number = heapq.heappop(order)
        took_s = feeders[number].step(targets[number].host)
        if took_s is not None:
            end_s = max(end_s, agents.now_s + took_s)
            heapq.heappush(order, (agents.now_s + took_s, number))
    fed_s = time.process_time() - began_s
    groups.grouped = grouped
    rows = {n: agents.rows[n] for n in range(num_nodes)}
    began_s = time.process_time()
    orders = transfers(rows, rows)
    planned_s = time.process_time() - began_s
    after = Counter(rows)
    for giver, gets in orders.items():
        after.subtract({giver: sum(gets.values())})
        after.update(gets)
    mean, apart = statistics.mean(rows.values()), max(rows.values()) - min(rows.values())
    passed = sum(sum(gets.values()) for gets in orders.values())
    return {
        "streams a feeder": max(map(len, made)),
        "groups a partition": round(statistics.mean(v for f in feeders for v in f.visits), 2),
        "questions/s, busiest agent": max(agents.asked.values()),
        "questions, KB/s in all": round(agents.nbytes / end_s / 1e3, 1),
        "rows apart, % of a node's": round(100 * apart / mean, 1),
        "rows passed on, %": round(100 * passed / sum(rows.values()), 2),
        "rows apart then": max(after.values()) - min(after.values()),
        "driver: plan of that, ms": round(planned_s * 1e3, 1),
        "CPU of the simulation, s": round(fed_s, 1),
    }


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


SIZES = {"control": (10, 100, 1_000, 10_000), "plan": (10, 100, 1_000, 10_000)}
SIZES["nodes"] = (2, 16, 64, 128)
SECTIONS: dict[str, Callable[[argparse.Namespace, list[Run]], list[Row]]] = {
    "control": control,
    "plan": lambda parsed, runs: alone("plan", plan, parsed),
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
