"""How long until every node is inside the user's function, with its framework imported?

Runs sparkdl, its peers and the floor, each in a process of its own, in turn, round after round, and
prints a table of medians. `README.md` says what is measured and why so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MARK = "BENCH_LAUNCH_RUN"
"""The environment variable by which a contestant's processes are known, whatever their group."""
GRACE_S = 10.0
"""How long the processes of a contestant may outlive it before they count as left behind."""


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
    """Run one contestant once, for at most `deadline_s` seconds, and kill what is left of it."""
    token = uuid.uuid4().hex
    command = [python, str(HERE / "contestants" / contestant.program), *contestant.arguments]
    load = os.getloadavg()[0]
    error = None
    with (
        tempfile.TemporaryDirectory(prefix="bench-launch-", ignore_cleanup_errors=True) as scratch,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        process = subprocess.Popen(
            [*command, "--launches", str(launches)],
            stdout=out,
            stderr=err,
            cwd=scratch,
            env=os.environ
            | {
                MARK: token,
                "PYTHONPATH": str(ROOT),
                "TMPDIR": scratch,
                "SPARK_LOCAL_DIRS": scratch,
            },
            start_new_session=True,
        )
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
        except BaseException:
            kill(token, grace_s=0)
            raise
        process.wait()
        left_behind = kill(token, GRACE_S)
        for stream in (out, err):
            stream.seek(0)
        records = [json.loads(line) for line in out]
        if code is None:
            error = f"not done after {deadline_s:.0f} s; last line: {last_line(err)}"
        elif code != 0:
            error = f"exit code {code}: {last_line(err)}"
    return Run(
        contestant.name,
        number,
        load,
        import_s=next(
            (record["import_s"] for record in records if record["event"] == "ready"), None
        ),
        launches=[
            Launch(record["entered_s"], record["down_s"], record["nodes_s"])
            for record in records
            if record["event"] == "launch"
        ],
        error=error,
        left_behind=left_behind,
    )


def last_line(stream: Iterator[str]) -> str:
    """Return the last line that names an error, or else the last line that is not empty."""
    lines = [line.strip() for line in stream if line.strip()]
    errors = [
        line for line in lines if "Error" in line.split(":")[0] or "Exception" in line.split(":")[0]
    ]
    return (errors or lines or ["(nothing was written to standard error)"])[-1]


def kill(token: str, grace_s: float) -> list[str]:
    """Kill what carries `token` and still runs after `grace_s` seconds; return the commands."""
    give_up = time.monotonic() + grace_s
    while (alive := marked(token)) and time.monotonic() < give_up:
        time.sleep(0.2)
    left_behind = sorted(alive.values())
    while alive:  # again and again, for what was started meanwhile
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        alive = marked(token)
    return left_behind


def marked(token: str) -> dict[int, str]:
    """Return the processes that inherited `token`: their commands by process id."""
    needle = f"{MARK}={token}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    words = (
                        (entry / "cmdline")
                        .read_bytes()
                        .replace(b"\0", b" ")
                        .decode(errors="replace")
                    )
                    found[int(entry.name)] = words.strip()[:200]
    return found


@dataclass(frozen=True)
class Figure:
    """A median, with the smallest and the largest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure | None:
        """Return the figure for `values`, or None if there are none."""
        return cls(statistics.median(values), min(values), max(values)) if values else None

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True)
class Row:
    """A contestant's line of the table: the figures, in seconds, and what went wrong.

    Attributes:
        contestant: Its name.
        runs: How many runs count.
        first: Until every node is in: the first launch of a session.
        again: The same for later launches in the same session.
        down: From the last node being in until everything is shut down, first launches.
        imports: How long the driver took to import the launcher; no part of the other figures.
        ratio: `first` over the floor's `first`, medians.
        errors: The distinct errors, with how often they came.
        left_behind: How many processes were left behind and killed.
    """

    contestant: str
    runs: int
    first: Figure | None
    again: Figure | None
    down: Figure | None
    imports: Figure | None
    ratio: float | None
    errors: dict[str, int]
    left_behind: int


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
        errors: dict[str, int] = {}
        for failed in (run for run in runs if run.contestant == contestant.name and run.error):
            errors[str(failed.error)] = errors.get(str(failed.error), 0) + 1
        first = Figure.of(entered(contestant.name, later=False))
        floor = Figure.of(entered(contestant.floor, later=False))
        rows.append(
            Row(
                contestant.name,
                runs=len(counted),
                first=first,
                again=Figure.of(entered(contestant.name, later=True)),
                down=Figure.of([run.launches[0].down_s for run in counted if run.launches]),
                imports=Figure.of([run.import_s for run in counted if run.import_s is not None]),
                ratio=first.median / floor.median if first and floor else None,
                errors=errors,
                left_behind=sum(
                    len(run.left_behind) for run in runs if run.contestant == contestant.name
                ),
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, failures below."""
    lines = [
        "| seconds, median (min-max) | first launch | of floor | again | until down | import |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [row.first or "failed", f"{row.ratio:.2f}" if row.ratio else "-"]
        cells += [figure or "-" for figure in (row.again, row.down, row.imports)]
        lines.append(f"| {row.contestant} | " + " | ".join(map(str, cells)) + " |")
    for row in rows:
        lines += [
            f"failed: {row.contestant}, {count} times: {error}"
            for error, count in row.errors.items()
        ]
        if row.left_behind:
            lines.append(
                f"left behind: {row.contestant}, {row.left_behind} processes in all, killed"
            )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers = ROOT / ".venv-peers" / "bin" / "python"
    parser.add_argument(
        "--repeats", type=int, default=5, help="rounds that count, after one that does not"
    )
    parser.add_argument("--launches", type=int, default=2, help="launches in each session")
    parser.add_argument(
        "--deadline-s", type=float, default=180, help="longest time for one contestant's process"
    )
    python = str(peers if peers.exists() else sys.executable)
    parser.add_argument("--python", default=python, help="the interpreter of the contestants")
    parser.add_argument(
        "--only", default="", help="run only the contestants whose name contains this"
    )
    parser.add_argument(
        "--json", type=Path, default=ROOT / "out" / "launch.json", help="every run and the table"
    )
    return parser.parse_args()


def main() -> None:
    """Run the rounds, print the table and write the JSON."""
    parsed = parse()
    contestants = [
        contestant for contestant in CONTESTANTS if parsed.only.lower() in contestant.name.lower()
    ]
    runs = []
    for number in range(parsed.repeats + 1):
        for contestant in contestants:
            done = run(contestant, number, parsed.python, parsed.launches, parsed.deadline_s)
            runs.append(done)
            figures = ", ".join(f"{launch.entered_s:.2f} s" for launch in done.launches)
            print(f"round {number}: {contestant.name}: {figures or 'failed'}", file=sys.stderr)
    rows = summarise(contestants, runs)
    print(table(rows))
    machine = {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    document = {
        "machine": machine,
        "rows": [asdict(row) for row in rows],
        "runs": [asdict(run) for run in runs],
    }
    parsed.json.parent.mkdir(parents=True, exist_ok=True)
    parsed.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
