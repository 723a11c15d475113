"""What the benchmarks share: contestants as processes of their own, in turn; medians; tables.

A contestant is a program that writes JSON lines, each with an `event`, to standard output. All its
processes inherit an environment variable, by which they are found and, if need be, killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from contestants.processes import MARK, marked

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
GRACE_S = 10.0
"""How long the processes of a contestant may outlive it before they count as left behind."""


@dataclass(frozen=True)
class Outcome:
    """What came of running one contestant once.

    Attributes:
        load: The machine's one-minute load average just before.
        records: What it wrote, one dict for each line.
        error: Why it failed, or None.
        left_behind: The commands of the processes that it left behind and that were killed.
    """

    load: float
    records: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    left_behind: list[str] = field(default_factory=list)

    def events(self, event: str) -> list[dict[str, Any]]:
        """Return the records of one kind."""
        return [record for record in self.records if record["event"] == event]


def run(python: str, program: str, arguments: Sequence[str], deadline_s: float) -> Outcome:
    """Run one contestant once, for at most `deadline_s` seconds, and kill what is left of it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the contestant would stay
    token = uuid.uuid4().hex
    load = os.getloadavg()[0]
    error = None
    with (
        tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as scratch,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        process = subprocess.Popen(
            [python, str(HERE / "contestants" / program), *arguments],
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
    return Outcome(load, records, error, left_behind)


def last_line(stream: Iterator[str]) -> str:
    """Return the last line that names an error, or else the last line that is not empty."""
    lines = [line.strip() for line in stream if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
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


@dataclass(frozen=True)
class Figure:
    """A median, with the smallest and the largest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Figure | None:
        """Return the figure for the values that are there, or None if there are none."""
        there = [value for value in values if value is not None]
        return cls(statistics.median(there), min(there), max(there)) if there else None

    def __str__(self) -> str:
        return self.show(lambda value: f"{value:.2f}")

    def show(self, form: Callable[[float], str]) -> str:
        """Return the figure as text, each number in this form."""
        return f"{form(self.median)} ({form(self.low)}-{form(self.high)})"


def thousands(value: float) -> str:
    """Return a number for a table: with separators, or with two decimals if it is small."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def ratio(of: Figure | None, to: Figure | None) -> float | None:
    """Return one median over another, if both are there."""
    return of.median / to.median if of and to and to.median else None


def markdown(header: Sequence[object], lines: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; what is None is a dash."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(
        "| " + " | ".join("-" if cell is None else str(cell) for cell in row) + " |" for row in rows
    )


class Failure(Protocol):
    """What `failures` needs to know of a run."""

    contestant: str
    error: str | None
    left_behind: list[str]


def failures(runs: Sequence[Failure]) -> list[str]:
    """Return lines: what failed, and how often; what was left behind."""
    errors: dict[tuple[str, str], int] = {}
    left: dict[str, int] = {}
    for one in runs:
        if one.error:
            key = (one.contestant, one.error)
            errors[key] = errors.get(key, 0) + 1
        if one.left_behind:
            left[one.contestant] = left.get(one.contestant, 0) + len(one.left_behind)
    lines = [f"failed: {name}, {count} times: {error}" for (name, error), count in errors.items()]
    return lines + [
        f"left behind: {name}, {count} processes in all, killed" for name, count in left.items()
    ]


def options(description: str | None, name: str, deadline_s: float) -> argparse.ArgumentParser:
    """Return the parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers = ROOT / ".venv-peers" / "bin" / "python"
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count")
    parser.add_argument(
        "--deadline-s",
        type=float,
        default=deadline_s,
        help="longest time for one contestant's process",
    )
    python = str(peers if peers.exists() else sys.executable)
    parser.add_argument("--python", default=python, help="the interpreter of the contestants")
    parser.add_argument(
        "--only",
        default="",
        type=partial(re.compile, flags=re.IGNORECASE),
        help="run only the contestants in whose name this regular expression is found",
    )
    parser.add_argument(
        "--json", type=Path, default=ROOT / "out" / f"{name}.json", help="every run and the table"
    )
    return parser


def write_json(path: Path, rows: Sequence[Any], runs: Sequence[Any], **more: Any) -> None:
    """Write the rows of the table and every run, both dataclasses, and the machine they are of."""
    document = {
        "machine": {
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
        },
        **more,
        "rows": [asdict(row) for row in rows],
        "runs": [asdict(run) for run in runs],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")
