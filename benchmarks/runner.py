"""What the benchmarks share: contestants in turn, their results, medians, tables, options.

A contestant is a program that writes JSON lines, each with an `event`, to standard output. All its
processes inherit an environment variable that identifies them, so that leftovers can be killed.
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from contestants.harness import MARK, marked

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
GRACE_S = 10.0
"""How long the processes of a contestant may outlive it before they count as left behind."""


@dataclass(frozen=True)
class Contestant:
    """A program to run with these arguments, on one of several data sets."""

    name: str
    program: str
    arguments: Mapping[str, Any]
    data: str = ""


@dataclass(frozen=True)
class Result:
    """The outcome of one run of a contestant.

    Attributes:
        round: Rounds up to 0 warm the machine up and do not count.
        load: The machine's one-minute load average before the run.
        records: The JSON lines that it wrote.
        left_behind: The commands of its leftover processes, which were killed.
    """

    contestant: Contestant
    round: int
    load: float
    records: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    left_behind: list[str] = field(default_factory=list)

    def values(self, event: str, key: str) -> list[Any]:
        """Return one value of each record of this event."""
        return [record.get(key) for record in self.records if record["event"] == event]


def wanted(
    parsed: argparse.Namespace, program: str, ways: Mapping[str, Mapping[str, Any]]
) -> list[Contestant]:
    """Return the contestants whose name matches `--only`."""
    return [
        Contestant(name, program, arguments)
        for name, arguments in ways.items()
        if parsed.only.search(name)
    ]


def in_turn(
    parsed: argparse.Namespace,
    contestants: Sequence[Contestant],
    arguments: Callable[[Contestant, list[Result]], Mapping[str, Any]],
    shown: tuple[str, str],
) -> list[Result]:
    """Run all contestants one after another, round after round.

    Args:
        arguments: Returns a contestant's further arguments, given the results so far.
        shown: The event and its figure to print after each run.
    """
    results: list[Result] = []
    for number in range(1 - parsed.warm_up, parsed.repeats + 1):
        for one in contestants:
            done = run(parsed, one, number, arguments(one, results))
            results.append(done)
            figures = [number_text(one) for one in done.values(*shown) if one is not None]
            what = done.error or ", ".join(figures) or "done"
            name = " ".join(filter(None, (one.data, one.name)))
            print(f"round {number}: {name}: {what}", file=sys.stderr)
    return results


def run(
    parsed: argparse.Namespace, contestant: Contestant, number: int, more: Mapping[str, Any]
) -> Result:
    """Run one contestant, for at most `--deadline-s` seconds, and kill its leftover processes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the contestant would stay
    token, load, error = uuid.uuid4().hex, os.getloadavg()[0], None
    with (
        tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as scratch,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        program = str(HERE / "contestants" / contestant.program)
        arguments = json.dumps({**more, **contestant.arguments})
        own = {"PYTHONPATH": str(ROOT), "TMPDIR": scratch, "SPARK_LOCAL_DIRS": scratch}
        process = subprocess.Popen(
            [parsed.python, program, arguments],
            stdout=out,
            stderr=err,
            cwd=scratch,
            env=os.environ | own | {MARK: token},
            start_new_session=True,
        )
        try:
            code = process.wait(parsed.deadline_s)
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
            error = f"not done after {parsed.deadline_s:.0f} s; last line: {last_line(err)}"
        elif code != 0:
            error = f"exit code {code}: {last_line(err)}"
    return Result(contestant, number, load, records, error, left_behind)


def last_line(stream: Iterator[str]) -> str:
    """Return the last line that names an error, or else the last line that is not empty."""
    lines = [line.strip() for line in stream if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["(nothing was written to standard error)"])[-1]


def kill(token: str, grace_s: float) -> list[str]:
    """Kill processes with `token` that still run after `grace_s` seconds; return their commands."""
    give_up = time.monotonic() + grace_s
    while (alive := marked(token)) and time.monotonic() < give_up:
        time.sleep(0.2)
    left_behind = sorted(alive.values())
    while alive:  # repeat: processes may have started others
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
    def of(cls, values: Iterable[float]) -> Figure | None:
        """Return the figure for these values, or None if there are none."""
        there = list(values)
        return cls(statistics.median(there), min(there), max(there)) if there else None

    def __str__(self) -> str:
        return f"{number_text(self.median)} ({number_text(self.low)}-{number_text(self.high)})"


def number_text(value: float) -> str:
    """Return a number for a table, with three digits or more."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{round(value, 4):.3g}"


def figure(
    results: Sequence[Result], name: str, event: str, key: str, which: slice = slice(None)
) -> Figure | None:
    """Return the figure of a contestant's rounds that count; `which` chooses in each round."""
    mine = [one for one in results if one.contestant.name == name and one.round > 0]
    values = [value for one in mine for value in one.values(event, key)[which]]
    return Figure.of(value for value in values if value is not None)


def ratio(of: Figure | None, to: Figure | None) -> float | None:
    """Return one median divided by another, if both exist."""
    return of.median / to.median if of and to and to.median else None


Cell = Figure | float | str | None
Table = Mapping[str, Mapping[str, Cell]]
"""The rows by name, each with its cells by column."""


def markdown(title: str, rows: Table) -> str:
    """Return a Markdown table, with a dash for None."""
    columns = list(next(iter(rows.values()), {}))
    lines = [[title, *columns], ["---"] * (len(columns) + 1)]
    for name, cells in rows.items():
        shown = (number_text(c) if isinstance(c, (int, float)) else c for c in cells.values())
        lines.append([name, *("-" if cell is None else str(cell) for cell in shown)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report(
    parsed: argparse.Namespace,
    tables: Mapping[str, Table],
    results: Sequence[Result],
    **more: object,
) -> None:
    """Print the tables, failures and leftover processes; write the JSON."""
    for title, rows in tables.items():
        if rows:
            print(f"{markdown(title, rows)}\n")
    failed = Counter((one.contestant.name, one.error) for one in results if one.error)
    for (name, error), count in failed.items():
        print(f"failed: {name}, {count} times: {error}")
    left = Counter(one.contestant.name for one in results for _ in one.left_behind)
    for name, count in left.items():
        print(f"left behind: {name}, {count} processes in all, killed")
    cores, machine, python = os.cpu_count(), platform.machine(), platform.python_version()
    document = {
        "machine": {"cores": cores, "machine": machine, "python": python},
        **more,
        "tables": tables,
        "runs": results,
    }
    parsed.json.parent.mkdir(parents=True, exist_ok=True)
    parsed.json.write_text(json.dumps(document, indent=2, default=asdict) + "\n")


def options(
    description: str | None, deadline_s: float, repeats: int = 5, warm_up: int = 1
) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks."""
    name = Path(sys.argv[0]).stem
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    peers = ROOT / ".venv-peers" / "bin" / "python"
    python = str(peers if peers.exists() else sys.executable)
    add("--repeats", "--rounds", type=int, default=repeats, help="rounds that count")
    add("--warm-up", type=int, default=warm_up, help="earlier rounds that do not count")
    add("--deadline-s", type=float, default=deadline_s, help="time limit of a contestant's run")
    add("--python", default=python, help="the interpreter of the contestants")
    pattern = partial(re.compile, flags=re.IGNORECASE)
    add("--only", default="", type=pattern, help="contestants whose name matches this expression")
    json_path = ROOT / "out" / f"{name}.json"
    add("--json", type=Path, default=json_path, help="file for every run and the tables")
    return parser


@contextlib.contextmanager
def data_folder(kept: Path | None) -> Iterator[Path]:
    """Yield the folder of `--data`, which is kept, or a temporary one."""
    with tempfile.TemporaryDirectory(prefix="bench-data-") as temporary:
        yield (kept or Path(temporary)).resolve()
