"""How long until every node is inside the user's function, with its framework imported?

Runs sparkdl, its peers and the floor, each in a process of its own, in turn, round after round, and
prints a table of medians. `README.md` says what is measured and why so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import runner
from runner import Figure


@dataclass(frozen=True)
class Contestant:
    """A program to run, and the floor that it is compared with."""

    name: str
    program: str
    arguments: tuple[str, ...]
    floor: str


CONTESTANTS = (
    Contestant("floor, tensorflow", "floor.py", ("--framework", "tensorflow"), "floor, tensorflow"),
    Contestant(
        "sparkdl, tensorflow",
        "sparkdl_launch.py",
        ("--framework", "tensorflow"),
        "floor, tensorflow",
    ),
    Contestant(
        "TensorFlowOnSpark, TENSORFLOW",
        "tfos.py",
        ("--input-mode", "tensorflow"),
        "floor, tensorflow",
    ),
    Contestant(
        "TensorFlowOnSpark, SPARK", "tfos.py", ("--input-mode", "spark"), "floor, tensorflow"
    ),
    Contestant("floor, torch", "floor.py", ("--framework", "torch"), "floor, torch"),
    Contestant("sparkdl, torch", "sparkdl_launch.py", ("--framework", "torch"), "floor, torch"),
    Contestant("TorchDistributor", "torch_distributor.py", (), "floor, torch"),
)


@dataclass(frozen=True)
class Launch:
    """One launch, in seconds.

    Attributes:
        entered_s: Until the last node was in.
        down_s: From then until everything was shut down.
        nodes_s: Until each node was in.
    """

    entered_s: float
    down_s: float
    nodes_s: list[float]


@dataclass(frozen=True)
class Run:
    """What came of running one contestant once.

    Attributes:
        contestant: Its name.
        round: The number of the round; round 0 warms the machine up and does not count.
        load: The machine's one-minute load average just before.
        import_s: How long the driver took to import the launcher, or None if it did not get so far.
        launches: The launches in its session.
        error: Why it failed, or None.
        left_behind: The commands of the processes that it left behind and that were killed.
    """

    contestant: str
    round: int
    load: float
    import_s: float | None = None
    launches: list[Launch] = field(default_factory=list)
    error: str | None = None
    left_behind: list[str] = field(default_factory=list)


def run(contestant: Contestant, number: int, python: str, launches: int, deadline_s: float) -> Run:
    """Run one contestant once."""
    arguments = [*contestant.arguments, "--launches", str(launches)]
    outcome = runner.run(python, contestant.program, arguments, deadline_s)
    return Run(
        contestant.name,
        number,
        outcome.load,
        import_s=next((record["import_s"] for record in outcome.events("ready")), None),
        launches=[
            Launch(record["entered_s"], record["down_s"], record["nodes_s"])
            for record in outcome.events("launch")
        ],
        error=outcome.error,
        left_behind=outcome.left_behind,
    )


@dataclass(frozen=True)
class Row:
    """A contestant's line of the table: the figures, in seconds.

    Attributes:
        contestant: Its name.
        runs: How many runs count.
        first: Until every node is in: the first launch of a session.
        again: The same for later launches in the same session.
        down: From the last node being in until everything is shut down, first launches.
        imports: How long the driver took to import the launcher; no part of the other figures.
        ratio: `first` over the floor's `first`, medians.
    """

    contestant: str
    runs: int
    first: Figure | None
    again: Figure | None
    down: Figure | None
    imports: Figure | None
    ratio: float | None


def summarise(contestants: Sequence[Contestant], runs: Sequence[Run]) -> list[Row]:
    """Return a row for each contestant; one that never ran to an end has a row too."""

    def entered(name: str, later: bool) -> list[float]:
        return [
            launch.entered_s
            for run in runs
            if run.contestant == name and run.round > 0
            for launch in (run.launches[1:] if later else run.launches[:1])
        ]

    rows = []
    for contestant in contestants:
        counted = [run for run in runs if run.contestant == contestant.name and run.round > 0]
        first = Figure.of(entered(contestant.name, later=False))
        floor = Figure.of(entered(contestant.floor, later=False))
        rows.append(
            Row(
                contestant.name,
                runs=len(counted),
                first=first,
                again=Figure.of(entered(contestant.name, later=True)),
                down=Figure.of([run.launches[0].down_s for run in counted if run.launches]),
                imports=Figure.of(run.import_s for run in counted),
                ratio=runner.ratio(first, floor),
            )
        )
    return rows


def table(rows: Sequence[Row], runs: Sequence[Run]) -> str:
    """Return the rows as a Markdown table, failures below."""
    header = [
        "seconds, median (min-max)",
        "first launch",
        "of floor",
        "again",
        "until down",
        "import",
    ]
    lines = [
        [
            row.contestant,
            row.first or "failed",
            f"{row.ratio:.2f}" if row.ratio else None,
            row.again,
            row.down,
            row.imports,
        ]
        for row in rows
    ]
    return "\n".join([runner.markdown(header, lines), *runner.failures(runs)])


def main() -> None:
    """Run the rounds, print the table and write the JSON."""
    parser = runner.options(__doc__, "launch", deadline_s=180)
    parser.add_argument("--launches", type=int, default=2, help="launches in each session")
    parsed = parser.parse_args()
    contestants = [contestant for contestant in CONTESTANTS if parsed.only.search(contestant.name)]
    runs = []
    for number in range(parsed.repeats + 1):
        for contestant in contestants:
            done = run(contestant, number, parsed.python, parsed.launches, parsed.deadline_s)
            runs.append(done)
            figures = ", ".join(f"{launch.entered_s:.2f} s" for launch in done.launches)
            print(f"round {number}: {contestant.name}: {figures or 'failed'}", file=sys.stderr)
    rows = summarise(contestants, runs)
    print(table(rows, runs))
    runner.write_json(parsed.json, rows, runs)


if __name__ == "__main__":
    main()
