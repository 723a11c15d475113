"""A child's log is read by its end, or line by line as it grows, and needs no disk."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given, strategies as st

from sparkdl.control.channel import Consumed, Reported
from sparkdl.control.messages import MAX_MESSAGE_NBYTES, LogLines, NodeActive, NodeLoad, encode
from sparkdl.control.rows import ReadCounts
from sparkdl.node import supervisor
from sparkdl.node.observation import Activity, LoadWatch, log_period_s
from sparkdl.node.supervisor import ChildLog
from tests.doubles.nvml import Device, Nvml


@pytest.fixture
def log(request: pytest.FixtureRequest) -> Iterator[ChildLog]:
    with closing(ChildLog(**getattr(request, "param", {}))) as log:
        yield log


def write(log: ChildLog, data: bytes) -> None:
    """Print as a child does, and let the agent take it before the pipe is full."""
    fd = log.open_for_child()
    for start in range(0, len(data), 4096):
        os.write(fd, data[start : start + 4096])
        log.nbytes()
    os.close(fd)


def test_a_childs_lines_outlive_it_and_its_log(log: ChildLog) -> None:
    write(log, b"one\n")
    fd = log.open_for_child()
    os.write(fd, b"two\n")
    log.close()
    with pytest.raises(BrokenPipeError):
        os.write(fd, b"nobody reads this\n")
    os.close(fd)
    log.add("three")
    assert log.tail(9) == ("one", "two", "three")
    log.close()


def test_log_is_bounded_however_much_is_printed(log: ChildLog) -> None:
    line = b"x" * 999 + b"\n"
    for _ in range(12):
        write(log, line * 1000)
    write(log, b"last\n")
    assert log.nbytes() == 12_000_005
    assert sum(map(len, log._new)) <= log.kept_chars
    assert len(log._last) == supervisor.LAST_LINES
    assert log.tail(2) == ("x" * 999, "last")


@pytest.mark.parametrize("log", [{"kept_chars": 1000}], indirect=True)
def test_lines_that_came_too_fast_to_be_shown_are_told_and_the_rest_is_whole(log: ChildLog) -> None:
    lines = [f"line {i:05}" for i in range(1000)]
    write(log, "\n".join(lines).encode())
    told, *heard = log.new_lines(is_last=True)
    assert heard == lines[-len(heard) :]
    assert int(told.split()[1]) == sum(map(len, lines[: -len(heard)]))
    assert log.new_lines(is_last=True) == ()


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\nb\n", ("a", "b")),
        (b"a\nb", ("a", "b")),
        (b"\n \na\n\n", ("a",)),
        (b"a\r\nb\r\n", ("a", "b")),
        (b"10%\r50%\r100%\ndone\n", ("100%", "done")),
        (b"10%\r50%\r   \n", ("50%",)),
        (b"\xff\xfe\n", ("\ufffd\ufffd",)),
        ("größer\n".encode(), ("größer",)),
        (b"x" * 5000, ("x" * 2000,)),
    ],
)
def test_lines_are_what_a_terminal_would_show_last(
    log: ChildLog, data: bytes, lines: tuple[str, ...]
) -> None:
    write(log, data)
    assert log.tail(10) == lines
    assert log.new_lines(is_last=True) == lines


@given(st.lists(st.text(st.characters(exclude_characters="\r\n\u2063", exclude_categories=["Cs"]),
                        min_size=1), max_size=12),  # \u2063 marks lines of errors
       st.data())  # fmt: skip
def test_lines_arrive_whole_however_they_are_written(words: list[str], data: st.DataObject) -> None:
    lines = [f"{i}{word}" for i, word in enumerate(words)]
    text = "".join(f"{line}\n" for line in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    with closing(ChildLog()) as log:
        heard: list[str] = []
        for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
            write(log, text[start:stop])
            heard += log.new_lines()
        assert [*heard, *log.new_lines(is_last=True)] == lines
        assert log.tail(100) == tuple(lines)


def test_largest_piece_fits_into_a_message_even_if_each_character_is_escaped(log: ChildLog) -> None:
    write(log, b"\x01" * log.read_chars)
    write(log, b"\x01\n" * (log.read_chars // 2))
    while lines := log.new_lines(is_last=True):
        assert len(encode(LogLines(lines))) <= MAX_MESSAGE_NBYTES


def test_a_line_that_never_ends_is_handed_on_rather_than_kept(log: ChildLog) -> None:
    for step in range(20):
        write(log, b"\rstep %d " % step + b"." * 10_000)
        for line in log.new_lines():
            assert line.startswith("step ")
    assert len(log._rest) <= supervisor._MAX_REST_NBYTES


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with closing(asyncio.new_event_loop()) as loop:
        yield loop


@pytest.fixture
def told() -> list[NodeActive]:
    return []


def test_the_first_step_is_told_at_once_and_those_of_a_moment_together(
    loop: asyncio.AbstractEventLoop, log: ChildLog, told: list[NodeActive]
) -> None:
    def report(now: NodeActive) -> None:
        told.append(now)
        if len(told) == 2:
            loop.stop()

    watched = Activity(loop, report, 10.0)
    watched.begin(1, log)
    for step in range(100):
        watched.note(Reported(step, {"loss": 0.5}))
    assert told == [NodeActive(1, 0, {"loss": 0.5})]
    loop.run_forever()
    assert told[1:] == [NodeActive(1, 99, {"loss": 0.5})]


def test_batches_are_those_of_files_that_the_child_reads_itself(
    loop: asyncio.AbstractEventLoop, log: ChildLog, told: list[NodeActive]
) -> None:
    watched = Activity(loop, told.append, 10.0)
    watched.begin(1, log)
    watched.note(Consumed("input", ReadCounts(100, steps=7)))
    assert told == []
    watched.note(Consumed("parquet:0", ReadCounts(100, steps=3), is_own=True))
    assert told == [NodeActive(1, batches=3)]


def test_that_something_is_printed_is_told_once_in_a_while(
    loop: asyncio.AbstractEventLoop, log: ChildLog, told: list[NodeActive]
) -> None:
    watched = Activity(loop, told.append, log_period_s(600.0))
    watched.begin(1, log)
    for _ in range(100):
        write(log, b"1234567\n")
        watched.printed()
    assert told == [NodeActive(1, log_nbytes=8)]
    watched.close()


HUNGRY = "import subprocess, sys; block = bytearray(64 << 20); print(1, flush=True); {}"
CHILD = "subprocess.run([sys.executable, '-c', sys.argv[1]])"
PARENT = HUNGRY.format(CHILD)
GRANDCHILD = HUNGRY.format("sys.stdin.read(); [None for _ in iter(int, 1)]")


def test_memory_and_cores_of_a_child_and_its_own_processes_are_told() -> None:
    told: list[NodeLoad] = []
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, GRANDCHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin
    assert process.stdout
    assert process.stdout.readline() + process.stdout.readline() == b"1\n1\n"

    async def look() -> None:
        loop, is_busy = asyncio.get_running_loop(), asyncio.Event()

        def report(load: NodeLoad) -> None:
            told.append(load)
            if load.cores > 0.1:
                is_busy.set()

        watch = LoadWatch(loop, report, (), lambda: (3, 10))
        watch.begin(lambda: process.pid)
        process.stdin.close()  # type: ignore[union-attr]
        await asyncio.wait_for(is_busy.wait(), 40)
        watch.close()

    try:
        asyncio.run(look())
    finally:
        subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=True)
        process.wait(20)
        process.stdout.close()
    assert told[0].memory_nbytes > 2 * 64 << 20
    assert (told[0].feed_nbytes, told[0].feed_limit_nbytes) == (3, 10)


@pytest.mark.parametrize("gpus", [("GPU-a", "GPU-c"), ("0", "2")])
def test_gpus_are_told_of_by_their_uuids_and_by_the_numbers_that_spark_assigns(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...]
) -> None:
    devices = [
        Device("H100", uuid=f"GPU-{one}", used_nbytes=nbytes, percent=percent)
        for one, nbytes, percent in (("a", 1, 80), ("b", 10, 90), ("c", 100, 40))
    ]
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(*devices))
    told: list[NodeLoad] = []

    async def look() -> None:
        watch = LoadWatch(asyncio.get_running_loop(), told.append, gpus, lambda: (0, 0))
        watch.begin(os.getpid)
        watch.close()

    asyncio.run(look())
    (load,) = told
    assert load.gpu == pytest.approx(0.6)
    assert load.gpu_nbytes == 101
