"""The same small training by all estimators: seconds, loss, accuracy, and lines of the program.

Each in a process and a Spark application of its own, in turn, round after round; `README.md` says
what is measured and why so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import runner
from contestants.estimators import WAYS
from runner import Figure


@dataclass(frozen=True)
class Run:
    """What came of one fit; see `launch.py`.

    Attributes:
        fit_s, score_s: Seconds of `fit`, and of scoring the test rows.
        loss: The mean of the last epoch, as the estimator's history has it.
        lines: Of the user's code.
    """

    contestant: str
    round: int
    load: float
    fit_s: float | None = None
    score_s: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    lines: int | None = None
    error: str | None = None
    left_behind: list[str] = field(default_factory=list)


def table(runs: Sequence[Run]) -> str:
    """Return a row for each estimator as a Markdown table."""
    lines = []
    for name in dict.fromkeys(run.contestant for run in runs):
        mine = [run for run in runs if run.contestant == name and run.round]
        seconds = Figure.of(run.fit_s for run in mine)
        rest = [
            _median(mine, "score_s", 1),
            _median(mine, "loss", 3),
            _median(mine, "accuracy", 3),
            _median(mine, "lines", 0),
        ]
        lines.append([name, seconds and seconds.show(lambda value: f"{value:.1f}"), *rest])
    header = ["median (min-max)", "fit, s", "score, s", "loss", "accuracy", "lines"]
    return runner.markdown(header, lines)


def _median(runs: Sequence[Run], name: str, digits: int) -> str | None:
    figure = Figure.of(getattr(run, name) for run in runs)
    return None if figure is None else f"{figure.median:.{digits}f}"


def main() -> None:
    """Run the rounds, print the table and write the JSON."""
    parser = runner.options(__doc__, "estimators", deadline_s=600)
    parser.set_defaults(repeats=3, python=sys.executable)
    parsed = parser.parse_args()
    chosen = [name for name in WAYS if parsed.only.search(name)]
    rounds = range(parsed.repeats + 1)
    runs = [_run(parsed, name, number) for number in rounds for name in chosen]
    print(table(runs))
    print("\n".join(runner.failures(runs)))
    runner.write_json(parsed.json, [], runs)


def _run(parsed: Any, name: str, number: int) -> Run:
    outcome = runner.run(parsed.python, "estimators.py", [name], parsed.deadline_s)
    done = {**next(iter(outcome.events("fit")), {})}
    done.pop("event", None)
    result = outcome.error or f"{done['fit_s']:.1f} s, accuracy {done['accuracy']:.3f}"
    print(f"round {number}: {name}: {result}", file=sys.stderr)
    return Run(
        name, number, outcome.load, **done, error=outcome.error, left_behind=outcome.left_behind
    )


if __name__ == "__main__":
    main()
