"""How long from the cut of a host's link until the driver knows, and until the others train again?

Each run has three hosts of its own, made of Linux namespaces (root is needed), with a standalone
cluster of Spark on them. `README.md` says what is measured and why so.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import runner
from runner import Figure

from tests.hosts.bed import SHARED, Program, hosts, why_not

CONTESTANTS = {
    "sparkdl": "sparkdl",
    "sparkdl, fed by Spark": "fed",
    "sparkdl, fed from a cache": "cached",
    "sparkdl, fed from a shuffle": "shuffled",
    "sparkdl, fed with a broadcast": "broadcast",
    "TorchDistributor": "torch",
    "TensorFlowOnSpark": "tfos",
}
"""What `contestants/hosts_training.py` calls them."""
PEERED = ("TensorFlowOnSpark",)
"""They run in the environment of `make peers`, with one slot a host: it supports no other."""
PEERS = runner.ROOT / ".venv-peers" / "bin" / "python"
PROGRAM = Path(__file__).resolve().parent / "contestants" / "hosts_training.py"
LAUNCHED_S = 200.0
MARGIN_S = 30.0


@dataclass(frozen=True)
class Run:
    """One cut.

    Attributes:
        load: The machine's one-minute load average just before.
        known_s: Seconds from the cut until the driver knew; None if it did not in time.
        step_s: Until a node of the next generation had taken a step; None if none did.
        fed_s: Until the call that was feeding returned; None if none did.
        said: What the driver said.
    """

    contestant: str
    round: int
    load: float
    known_s: float | None = None
    step_s: float | None = None
    fed_s: float | None = None
    said: str = ""
    error: str | None = None
    left_behind: tuple[str, ...] = ()


def run(contestant: str, number: int, deadline_s: float) -> Run:
    """Start a training, cut the link of one of its two hosts, and wait for what follows."""
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory(prefix="bench-hosts-", ignore_cleanup_errors=True) as scratch,
        hosts(Path(scratch), "h0", "h1", "h2") as bed,
    ):
        try:
            slots = 1 if contestant in PEERED else 2
            master = bed.start_spark("h0", {"h1": slots, "h2": slots})
            python = str(PEERS) if contestant in PEERED else sys.executable
            driver = bed["h0"].run(
                *(python, str(PROGRAM), CONTESTANTS[contestant], master),
                *(f"{SHARED}/run", "--deadline-s", str(deadline_s)),
                **{"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python},
            )
            driver.wait_for("training", LAUNCHED_S)
            bed["h2"].cut()
            cut_s = time.time()
            driver.wait_for("done", 3 * deadline_s + MARGIN_S)
        except AssertionError as error:
            return Run(contestant, number, load, error=str(error)[-500:])
        known, stepped = event_of(driver, "known"), event_of(driver, "stepped")
        fed, said = event_of(driver, "fed"), event_of(driver, "said") or {}
        return Run(
            contestant,
            number,
            load,
            float(known["at_s"]) - cut_s if known else None,
            float(stepped["stepped_s"]) - cut_s if stepped else None,
            float(fed["at_s"]) - cut_s if fed else None,
            str(said.get("text", "")),
        )


def event_of(driver: Program, name: str) -> dict[str, object] | None:
    """Return what the driver program has told of an event, if it has."""
    return next((event for event in driver.events() if event["event"] == name), None)


@dataclass(frozen=True)
class Row:
    """A contestant's line of the table; what did not happen within the deadline counts as that."""

    contestant: str
    runs: int
    known: str
    step: str
    fed: str


def summarise(contestants: Sequence[str], runs: Sequence[Run], deadline_s: float) -> list[Row]:
    """Return a row for each contestant."""

    def shown(values: Sequence[float | None]) -> str:
        late = f"> {deadline_s:g}"
        if not values or all(value is None for value in values):
            return late if values else "-"
        figure = Figure.of(deadline_s if value is None else value for value in values)
        assert figure is not None
        worst = late if None in values else f"{figure.high:.1f}"
        return f"{figure.median:.1f}, {worst}"

    rows = []
    for contestant in contestants:
        there = [one for one in runs if one.contestant == contestant and one.error is None]
        known, step = [one.known_s for one in there], [one.step_s for one in there]
        fed = shown([one.fed_s for one in there]) if "fed" in contestant else "-"
        rows.append(Row(contestant, len(there), shown(known), shown(step), fed))
    return rows


def table(rows: Sequence[Row], runs: Sequence[Run]) -> str:
    """Return the rows as a Markdown table, what drivers said and failures below."""
    header = [
        "seconds since the cut, median, worst",
        "runs",
        "driver knows",
        "next step",
        "all fed",
    ]
    lines = [[row.contestant, row.runs, row.known, row.step, row.fed] for row in rows]
    said = Counter((one.contestant, re.sub(r"\d{2,}", "…", one.said)) for one in runs if one.said)
    told = [f"{name} said, {count} times: {text}" for (name, text), count in said.items()]
    return "\n".join([runner.markdown(header, lines), *told, *runner.failures(runs)])


def main() -> None:
    """Run the rounds, print the table and write the JSON."""
    parser = runner.options(__doc__, "hosts", deadline_s=120)
    parser.add_argument("--runs", type=int, default=20, help="of each contestant")
    parsed = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"no hosts can be made here: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the hosts would stay
    os.environ["PYTHONPATH"] = os.pathsep.join([str(runner.ROOT), str(PROGRAM.parent)])
    wanted = [name for name in CONTESTANTS if parsed.only.search(name)]
    runs = []
    for number in range(parsed.runs):
        for contestant in wanted:
            done = run(contestant, number, parsed.deadline_s)
            runs.append(done)
            seconds = (done.known_s, done.step_s, done.fed_s)
            times = [f"{value:.1f} s" if value else "-" for value in seconds]
            print(f"run {number}: {contestant}: {done.error or ', '.join(times)}", file=sys.stderr)
    rows = summarise(wanted, runs, parsed.deadline_s)
    print(table(rows, runs))
    runner.write_json(parsed.json, rows, runs)


if __name__ == "__main__":
    main()
