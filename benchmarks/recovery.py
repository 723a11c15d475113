"""How long from the kill of a process of a training until it trains again, and who says what when?

Runs sparkdl, its peers and the floors, each in a process of its own, in turn, round after round,
and prints a table of medians. `README.md` says what is measured and why so.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import runner
from runner import Figure


@dataclass(frozen=True)
class Contestant:
    """A program to run, and the floor that it is compared with.

    Attributes:
        warm_up: Kills in each run that do not count.
        max_kills: As many that count; one that only a long timeout ends has fewer.
    """

    name: str
    program: str
    arguments: tuple[str, ...]
    floor: str
    warm_up: int = 1
    max_kills: int = 100


IMPORT_TENSORFLOW, IMPORT_TORCH = "floor: import tensorflow", "floor: import torch"
EXECUTOR = "floor: Spark replaces an executor"
CONTESTANTS = (
    Contestant(IMPORT_TENSORFLOW, "recovery_floor.py", ("--of", "import"), IMPORT_TENSORFLOW),
    Contestant("sparkdl, tensorflow: child", "recovery_sparkdl.py", (), IMPORT_TENSORFLOW),
    Contestant(
        IMPORT_TORCH, "recovery_floor.py", ("--of", "import", "--framework", "torch"), IMPORT_TORCH
    ),
    Contestant(
        "sparkdl, torch: child", "recovery_sparkdl.py", ("--framework", "torch"), IMPORT_TORCH
    ),
    Contestant("TorchDistributor: child", "recovery_torch.py", (), IMPORT_TORCH),
    Contestant(EXECUTOR, "recovery_floor.py", ("--of", "executor"), EXECUTOR),
    Contestant(
        "sparkdl, tensorflow: executor", "recovery_sparkdl.py", ("--victim", "executor"), EXECUTOR
    ),
    Contestant("TensorFlowOnSpark: child", "recovery_tfos.py", (), IMPORT_TENSORFLOW, 0, 1),
)


@dataclass(frozen=True)
class Recovery:
    """One kill, in seconds since then; None where it did not happen.

    Attributes:
        known_s: Until the driver knew: sparkdl's state, a peer's call that ended.
        back_s: Until all nodes were inside the user's function again.
        step_s: Until all of them had taken a step.
        said: What the driver said.
    """

    known_s: float | None
    back_s: float | None
    step_s: float | None
    said: str


@dataclass(frozen=True)
class Run:
    """What came of running one contestant once; see `launch.py`."""

    contestant: str
    round: int
    load: float
    recoveries: list[Recovery] = field(default_factory=list)
    error: str | None = None
    left_behind: list[str] = field(default_factory=list)


def run(
    contestant: Contestant, number: int, python: str, kills: int, after_s: float, deadline_s: float
) -> Run:
    """Run one contestant once."""
    kills = contestant.warm_up + min(kills, contestant.max_kills)
    arguments = [*contestant.arguments, "--kills", str(kills), "--after-s", str(after_s)]
    outcome = runner.run(python, contestant.program, arguments, deadline_s)
    recoveries = [
        Recovery(
            record.get("known_s"),
            record.get("back_s"),
            record.get("step_s"),
            record.get("said", ""),
        )
        for record in outcome.events("recovery")
    ]
    counted = recoveries[contestant.warm_up :]
    return Run(contestant.name, number, outcome.load, counted, outcome.error, outcome.left_behind)


@dataclass(frozen=True)
class Row:
    """A contestant's line of the table: the figures, in seconds.

    Attributes:
        contestant: Its name.
        kills: How many count.
        known, back, step: See `Recovery`.
        beyond: `back` less the floor's, medians.
        said: What drivers said, and how often.
    """

    contestant: str
    kills: int
    known: Figure | None
    back: Figure | None
    step: Figure | None
    beyond: float | None
    said: dict[str, int]


def summarise(contestants: Sequence[Contestant], runs: Sequence[Run]) -> list[Row]:
    """Return a row for each contestant; one that never ran to an end has a row too."""

    def kills_of(name: str) -> list[Recovery]:
        return [one for run in runs if run.contestant == name for one in run.recoveries]

    rows = []
    for contestant in contestants:
        kills = kills_of(contestant.name)
        back = Figure.of(one.back_s for one in kills)
        floor = Figure.of(one.back_s for one in kills_of(contestant.floor))
        rows.append(
            Row(
                contestant.name,
                len(kills),
                Figure.of(one.known_s for one in kills),
                back,
                Figure.of(one.step_s for one in kills),
                back.median - floor.median if back and floor else None,
                dict(Counter(re.sub(r"\d{3,}", "…", one.said) for one in kills if one.said)),
            )
        )
    return rows


def table(rows: Sequence[Row], runs: Sequence[Run]) -> str:
    """Return the rows as a Markdown table, what drivers said and failures below."""
    header = [
        *("seconds since the kill, median (min-max)", "kills", "driver knows", "all back"),
        *("beyond the floor", "all have stepped"),
    ]
    lines = [
        [
            row.contestant,
            row.kills,
            row.known,
            row.back,
            None if row.beyond is None else f"{row.beyond:+.2f}",
            row.step,
        ]
        for row in rows
    ]
    said = [
        f"{row.contestant} said, {count} times: {text}"
        for row in rows
        for text, count in row.said.items()
    ]
    return "\n".join([runner.markdown(header, lines), *said, *runner.failures(runs)])


def main() -> None:
    """Run the rounds, print the table and write the JSON."""
    parser = runner.options(__doc__, "recovery", deadline_s=600)
    parser.set_defaults(repeats=2)
    parser.add_argument(
        "--kills",
        type=int,
        default=5,
        help="kills in each session, after one to warm up",
    )
    parser.add_argument(
        "--after-s",
        type=float,
        default=12.0,
        help="seconds that all nodes have trained before each kill",
    )
    parsed = parser.parse_args()
    wanted = [one for one in CONTESTANTS if parsed.only.search(one.name)]
    floors = {one.floor for one in wanted}
    contestants = [one for one in CONTESTANTS if one in wanted or one.name in floors]
    runs = []
    for number in range(parsed.repeats):
        for contestant in contestants:
            done = run(
                *(contestant, number, parsed.python),
                *(parsed.kills, parsed.after_s, parsed.deadline_s),
            )
            runs.append(done)
            times = ", ".join(f"{one.back_s or -1:.2f} s" for one in done.recoveries)
            print(f"round {number}: {contestant.name}: {times or 'failed'}", file=sys.stderr)
    rows = summarise(contestants, runs)
    print(table(rows, runs))
    runner.write_json(parsed.json, rows, runs)


if __name__ == "__main__":
    main()
