"""The child's end of the pipe sorts what comes into feeds, and ends with its agent."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from sparkdl.control import channel
from sparkdl.control.channel import EndMark, Local
from sparkdl.control.descriptors import OUT_OF_DESCRIPTORS, close_fd
from sparkdl.control.messages import EpochEnd, FeedBegin
from sparkdl.control.rows import ReadCounts
from sparkdl.core.errors import ConfigError, FeedClosedError, FeedTypeError, ReadError, UnfedError
from sparkdl.core.options import Feeding, Roles
from sparkdl.core.settings import Settings
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.world import FIRST_TIME, Address, Resume, build_world
from sparkdl.datasets.tfos import DataFeed
from sparkdl.feed.reader.batches import EpochBatches
from sparkdl.feed.reader.cursor import Item
from sparkdl.feed.store.segment import write_segment
from sparkdl.node.link import AgentLink, FeedReaders
from tests.doubles.feeds import SOON_S, Running, numbers


class Ends:
    def __init__(self) -> None:
        self.agents, child_end = socket.socketpair()
        self.agents.settimeout(SOON_S)
        self.link = AgentLink(child_end)
        self._unframer = channel.Unframer()
        self._heard: list[channel.Local] = []

    def send(self, message: channel.Local) -> None:
        fd = os.dup(self.agents.fileno()) if channel.carries_fd(message) else -1
        channel.send(self.agents, message, fd)
        close_fd(fd)

    def begun(self) -> channel.Start:
        message, port = self.link.wait_start()
        port.close()
        return message

    def send_segment(self, number: int, feed: str = "input", epoch: int = 0) -> None:
        fd, nbytes = write_segment(numbers(number, number + 1))
        channel.send(self.agents, channel.Segment(feed, number, epoch, 1, nbytes), fd)
        os.close(fd)

    def hear(self) -> channel.Local:
        while not self._heard:
            messages = channel.receive(self.agents, self._unframer)
            assert messages is not None, "the child has hung up"
            self._heard += [message for message, _ in messages]
        return self._heard.pop(0)


@contextmanager
def linked() -> Iterator[Ends]:
    ends = Ends()
    try:
        yield ends
    finally:  # a link whose agent goes ends this process
        if ends.link._thread.is_alive():
            ends.link.close()
    for reader in ends.link.feeds._readers.values():
        try:
            reader.terminate()
        except FeedClosedError:
            continue
    ends.agents.close()


def start(resume: Resume = FIRST_TIME, **options: Any) -> channel.Start:
    nodes = plan_nodes(1)
    world = build_world(0, {node: Address("h", 1, "") for node in nodes})
    return channel.Start(world, 0, ClusterSpec("c", nodes, **options), resume)


SOON_GIVEN_UP = Settings(feeding=Feeding(timeout_s=0.05))


def row(item: object) -> int:
    assert isinstance(item, Item)
    return int(item.batch().column(0)[0].as_py())


def test_who_waits_long_for_the_world_uses_the_time() -> None:
    used = list[str]()
    with linked() as ends:
        ends.send(start())
        ends.link.wait_start(lambda: used.append("at once"))[1].close()

    def send_late() -> None:
        used.append("late")
        ends.send(start())

    with linked() as ends:
        ends.link.wait_start(send_late, 0.01)[1].close()
    assert used == ["late"]


def test_world_without_its_port_is_an_error_that_says_what_to_raise() -> None:
    with linked() as ends:
        ends.link._dispatch(start(), -1)  # the kernel drops descriptors that are too many
        with pytest.raises(ConfigError, match=re.escape(OUT_OF_DESCRIPTORS)):
            ends.begun()


def test_feed_of_a_cluster_that_nobody_feeds_is_refused_at_once_by_whatever_reads_it() -> None:
    with linked() as ends:
        ends.send(start(settings=Settings(feeding=Feeding(fed=False))))
        ends.begun()
        reader = ends.link.feeds.reader("input")
        readers: list[Callable[[], Any]] = [
            lambda: list(EpochBatches(reader, 4)),
            lambda: DataFeed(reader, ends.link.send).next_batch(4),
            lambda: DataFeed(reader, ends.link.send, train_mode=False).next_batch(4),
            reader.peek_batch,
            reader.has_epoch,
        ]
        for read in readers:
            with pytest.raises(ConfigError, match=r"feed 'input' cannot be read.*fed=False"):
                read()


def test_feed_of_a_name_that_nobody_feeds_is_given_up_and_says_what_is_fed() -> None:
    with linked() as ends:
        ends.send(start(settings=SOON_GIVEN_UP))
        ends.send(FeedBegin("input", 0, 0))
        ends.send_segment(0, feed="test")
        ends.begun()
        misspelt = ends.link.feeds.reader("inputs")
        message = (
            r"feed 'inputs' received no data on worker:0 within 0.05 s \(Feeding\(timeout_s=…\)\); "
            r"feeds with data: 'input', 'test'"
        )
        with pytest.raises(UnfedError, match=message):
            list(EpochBatches(misspelt, 4))


@pytest.mark.parametrize("why", ["begun", "inference", "resumed", "evaluator"])
def test_feed_that_may_still_come_is_waited_for(why: str) -> None:
    with linked() as ends:
        first = start(Resume(1) if why == "resumed" else FIRST_TIME, settings=SOON_GIVEN_UP)
        if why == "evaluator":
            nodes = plan_nodes(2, Roles(evaluator=True))
            world = build_world(0, {node: Address("h", 1, "") for node in nodes})
            first = channel.Start(world, 0, ClusterSpec("c", nodes, settings=SOON_GIVEN_UP))
        ends.send(first)
        ends.begun()
        reader = ends.link.feeds.reader("input")
        if why == "begun":
            ends.send(FeedBegin("input", 0, 0))
            ends.send(EpochEnd("other", 0, {}))  # behind it, so that it has been heard
            ends.link.feeds.reader("other").has_epoch()
        feed = DataFeed(reader, ends.link.send, train_mode=why != "inference")
        waiting = Running(lambda: feed.next_batch(1))
        assert waiting.still_runs(4 * SOON_GIVEN_UP.feeding.timeout_s)
        ends.send(channel.EndMark(""))
        assert waiting.result() == []


def test_messages_of_several_threads_do_not_mix() -> None:
    with linked() as ends:

        def say(number: int) -> None:
            for i in range(20):
                ends.link.send(channel.Consumed(str(number) * 50_000, ReadCounts(i)))

        sending = [Running(partial(say, number)) for number in range(4)]
        heard = [ends.hear() for _ in range(80)]
        for each in sending:
            each.result()
        for number in range(4):
            mine = [
                m.given.rows
                for m in heard
                if isinstance(m, channel.Consumed) and m.feed[0] == str(number)
            ]
            assert mine == list(range(20))


def test_closed_link_fails_every_wait() -> None:
    with linked() as ends:
        reader = ends.link.feeds.reader("input")
        owner = reader.claim()
        waiting = Running(lambda: reader.take(owner))
        ends.link.close()
        with pytest.raises(FeedClosedError, match="agent of this node is gone"):
            waiting.result()
        late = ends.link.feeds.reader("late")
        with pytest.raises(FeedClosedError, match="agent of this node is gone"):
            late.take(late.claim())
        with pytest.raises(FeedClosedError, match="agent of this node is gone"):
            late.peek_batch()
        with pytest.raises(FeedClosedError, match="agent of this node is gone"):
            ends.link.send(channel.Consumed("input"))
        with pytest.raises(FeedClosedError, match="before the training began"):
            ends.begun()


_CHILD = """
import socket, sys, threading
from sparkdl.node.link import AgentLink

link = AgentLink(socket.socket(fileno=int(sys.argv[1])))
print("up", flush=True)
threading.Event().wait(60)
"""


@pytest.mark.parametrize("last", [b"", b"\x00\x00\x00\x02{]"])
def test_process_does_not_outlive_its_agent(last: bytes) -> None:
    """The agent vanishes, in order or in the middle of nonsense."""
    agents, child_end = socket.socketpair()
    with agents, child_end:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(child_end.fileno())],
            pass_fds=[child_end.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        )
        with child:
            child_end.close()
            assert child.stdout is not None
            assert child.stdout.readline() == "up\n"
            agents.sendall(last)
            agents.close()
            assert child.wait(SOON_S) == -signal.SIGKILL


def test_number_of_batches_is_of_the_default_feed_or_of_the_only_one() -> None:
    with linked() as ends:
        ends.link.feeds.registry.tracks = True
        for feed in ("input", "more"):
            for number in range(3):
                ends.send_segment(number, feed)
            ends.link.feeds.reader(feed).begin()
        assert ends.link.feeds.positions(None) == ends.link.feeds.positions(0) == ({}, {})
        with pytest.raises(ConfigError, match="names no feed"):
            ends.link.feeds.positions(1)
        reading = {f: iter(EpochBatches(ends.link.feeds.reader(f), 1)) for f in ("input", "more")}
        next(reading["more"])
        assert ends.link.feeds.positions(1)[0] == {"more": {0: {0: ((0, 1),)}}}
        for _ in range(2):
            next(reading["input"])
        one, two = {0: {0: ((0, 1),)}}, {0: {0: ((0, 1),), 1: ((0, 1),)}}
        assert ends.link.feeds.positions(1)[0] == {"input": one, "more": one}
        assert ends.link.feeds.positions({"input": 2, "more": 0})[0] == {"input": two, "more": {}}
        with pytest.raises(ConfigError, match=r"names \['other'\]"):
            ends.link.feeds.positions({"other": 2})


def test_end_of_all_feeds_reaches_late_readers_and_none_that_the_node_fills_itself() -> None:
    readers = FeedReaders(list[Local]().append)
    own = readers.own_files(None).reader
    readers.take(EndMark(""), -1)
    assert not readers.reader("late").has_epoch()
    own.fail(ReadError("no such file"))
    with pytest.raises(ReadError, match="no such file"):
        own.has_epoch()


def test_error_that_repeats_one_of_a_feed_is_that_one() -> None:
    readers = FeedReaders(list[Local]().append)
    found = readers.registry.raised = FeedTypeError("column 'c' holds 1 null")
    of_a_graph = ValueError(f"Graph execution error: FeedTypeError: {found}\nat PyFunc")
    assert readers.cause_of(of_a_graph) is found
    other = ValueError("Graph execution error: out of memory")
    assert readers.cause_of(other) is other
    assert readers.cause_of(found) is found
