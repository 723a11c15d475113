"""The same small network on the same data, by every way to train it in parallel.

Runs each way with 1, 2 and 4 nodes, each in processes of its own, in turn, round after round, and
prints examples per second, how well they scale, and the loss beside that of one process.
`README.md` says what is measured and why so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import runner
from runner import Figure

NAMES = {
    "mirrored": "Keras, MultiWorkerMirroredStrategy",
    "hvd-keras": "Keras, Horovod's optimizer",
    "ddp": "PyTorch, DDP",
    "fsdp": "PyTorch, FSDP2",
    "hvd-torch": "PyTorch, Horovod's optimizer",
    "lightning": "Lightning, DDP",
    "jax": "JAX, data parallel",
    "keras-jax": "Keras on JAX, DataParallel",
}


@dataclass(frozen=True)
class Run:
    """What came of training by one way once; see `launch.py`.

    Attributes:
        rate: Examples per second, of all nodes.
        loss: Over all rows, after the last step.
    """

    contestant: str
    nodes: int
    round: int
    load: float
    rate: float | None = None
    loss: float | None = None
    error: str | None = None
    left_behind: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """One way with so many nodes.

    Attributes:
        efficiency: Of the rate, over as many times that of one node as there are nodes, or cores
            if these are fewer.
        loss_difference: From the same way's loss with one node, over that.
    """

    contestant: str
    nodes: int
    rate: Figure | None
    efficiency: float | None
    loss: float | None
    loss_difference: float | None


def summarise(runs: Sequence[Run], cores: int) -> list[Row]:
    """Return a row for each way and number of nodes."""

    def of(name: str, nodes: int) -> list[Run]:
        return [r for r in runs if (r.contestant, r.nodes) == (name, nodes) and r.round]

    rows = []
    for name, nodes in dict.fromkeys((run.contestant, run.nodes) for run in runs):
        rate = Figure.of(run.rate for run in of(name, nodes))
        alone = Figure.of(run.rate for run in of(name, 1))
        loss = Figure.of(run.loss for run in of(name, nodes))
        loss_alone = Figure.of(run.loss for run in of(name, 1))
        ratio = runner.ratio(rate, alone)
        rows.append(
            Row(
                name,
                nodes,
                rate,
                ratio / min(nodes, cores) if ratio else None,
                loss.median if loss else None,
                loss.median / loss_alone.median - 1 if loss and loss_alone else None,
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, one line a way."""
    counts = sorted({row.nodes for row in rows})
    header = [
        "examples/s, median (min-max)",
        *(f"{count} node{'s' * (count > 1)}" for count in counts),
        *(f"efficiency, {count}" for count in counts if count > 1),
        "loss, one node",
        *(f"difference, {count}" for count in counts if count > 1),
    ]
    lines = []
    for name in dict.fromkeys(row.contestant for row in rows):
        mine = {row.nodes: row for row in rows if row.contestant == name}
        lines.append(
            [
                name,
                *(row.rate and row.rate.show(runner.thousands) for row in mine.values()),
                *(_percent(row.efficiency) for row in mine.values() if row.nodes > 1),
                *(
                    f"{row.loss:.4f}" if row.loss else None
                    for row in mine.values()
                    if row.nodes < 2
                ),
                *(_scientific(row.loss_difference) for row in mine.values() if row.nodes > 1),
            ]
        )
    return runner.markdown(header, lines)


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.0%}"


def _four(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"


def _scientific(value: float | None) -> str | None:
    return None if value is None else f"{value:.0e}"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw examples/s over nodes, a line for each way."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "sparkdl"  # the same figures give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name in dict.fromkeys(row.contestant for row in rows):
        mine = [(row.nodes, row.rate.median) for row in rows if row.contestant == name and row.rate]
        if mine:
            axes.plot(*zip(*mine, strict=True), marker="o", label=name)
    axes.set(xlabel="nodes", ylabel="examples per second", xscale="log", ylim=(0, None))
    counts = sorted({row.nodes for row in rows})
    axes.set_xticks(counts, map(str, counts), minor=False)
    axes.minorticks_off()
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Run the rounds, print the table, draw the plot and write the JSON."""
    parser = runner.options(__doc__, "frameworks", deadline_s=600)
    parser.set_defaults(repeats=3, python=sys.executable)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch", type=int, default=256, help="rows in a step, of all nodes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plot", type=Path, default=runner.ROOT / "out" / "frameworks.svg")
    parsed = parser.parse_args()
    runs: list[Run] = []
    for number in range(parsed.repeats + 1):
        for way, name in NAMES.items():
            if not parsed.only.search(name):
                continue
            for nodes in parsed.nodes:
                done = _run(parsed, way, nodes, number)
                runs.append(done)
                result = done.error or f"{done.rate:,.0f} examples/s, loss {done.loss:.4f}"
                print(f"round {number}: {nodes} nodes: {name}: {result}", file=sys.stderr)
    cores = os.cpu_count() or 1
    rows = summarise(runs, cores)
    print(table(rows))
    print(f"\n{cores} cores, one thread a node; {parsed.batch} rows in a step of all nodes.")
    print("\n".join(runner.failures(runs)))
    plot(rows, parsed.plot)
    runner.write_json(parsed.json, rows, runs, batch=parsed.batch, steps=parsed.steps)


def _run(parsed: Any, way: str, nodes: int, number: int) -> Run:
    arguments = [f"--way={way}", f"--nodes={nodes}"]
    arguments += [f"--batch={parsed.batch}", f"--steps={parsed.steps}"]
    outcome = runner.run(parsed.python, "ways.py", arguments, parsed.deadline_s)
    done = next(iter(outcome.events("trained")), {})
    rate = done["rows"] / done["seconds"] if done else None
    return Run(
        *(NAMES[way], nodes, number, outcome.load, rate, done.get("loss")),
        error=outcome.error,
        left_behind=outcome.left_behind,
    )


if __name__ == "__main__":
    main()
