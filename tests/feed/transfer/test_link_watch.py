"""A feeder tells the driver of hosts that are silent, and of no others."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from sparkdl.control.cause import CutLink
from sparkdl.feed.transfer import link_watch, messages
from sparkdl.feed.transfer.link_watch import LinkWatch, Silence
from sparkdl.feed.transfer.messages import FeedSpec, Target, knock
from tests.control.rooms import LOOPBACK, SOON_S, TOKEN, Room, on_loop, room


def target_of(listening: socket.socket, node_id: int = 0) -> Target:
    return Target(node_id, f"worker:{node_id}", f"grpc://{LOOPBACK}:{listening.getsockname()[1]}")


@contextmanager
def silent_host() -> Iterator[Target]:
    """A port whose kernel drops what comes: nobody has taken the connections before."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server((LOOPBACK, 0), backlog=0))
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield target_of(listening)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_watch, "_LOOK_S", 0.01)
    monkeypatch.setattr(messages, "_LISTENING_S", 0.05)


def spec_for(here: Room) -> FeedSpec:
    return FeedSpec(
        *("f", 0, "run", (), TOKEN), generation=3, host_timeout_s=0.1, coordinator=here.address.url
    )


def test_silence_a_refusal_and_a_process_that_stands_still_are_told_apart() -> None:
    with socket.create_server((LOOPBACK, 0)) as still:
        there = target_of(still)
        assert knock(there) == "accepts"
    assert knock(there) == "refuses"
    with silent_host() as silent:
        assert knock(silent) == "silent"


def test_silence_has_to_last_and_to_be_seen_several_times() -> None:
    assert not Silence(0.0, 4).lasts(7.9, 8.0)
    assert Silence(0.0, 4).lasts(8.0, 8.0)
    assert not Silence(0.0, 3).lasts(100.0, 8.0), "the watch itself stood still, perhaps"


@on_loop
async def test_silent_host_is_told_of_with_generation_and_own_address() -> None:
    with silent_host() as silent:
        async with room(num_nodes=1) as here, here.agent("a"):
            here.heard.agents = {0: "a"}
            with LinkWatch(spec_for(here), lambda: [silent]):
                assert await here.heard.next() == ("cut", CutLink(3, 0, LOOPBACK))
                assert (await here.heard.next())[0] == "cut", "until it is decided"


@pytest.mark.parametrize("state", ["still", "gone", "awaited no more"])
@on_loop
async def test_nobody_else_is_told_of(state: str) -> None:
    looks = threading.Semaphore(0)
    with socket.create_server((LOOPBACK, 0)) as still, silent_host() as silent:
        target = silent if state == "awaited no more" else target_of(still)
        if state == "gone":
            still.close()

        def awaited() -> list[Target]:
            looks.release()
            return [] if state == "awaited no more" and seen > 2 else [target]

        seen = 0
        async with room(num_nodes=1) as here, here.agent("a"):
            here.heard.agents = {0: "a"}
            with LinkWatch(spec_for(here), awaited):
                for _ in range(20):
                    await asyncio.to_thread(looks.acquire)
                    seen += 1
            assert here.heard.queue.empty()


def test_watch_without_a_driver_to_tell_starts_no_thread() -> None:
    with LinkWatch(FeedSpec("f", 0, "run", (), TOKEN), lambda: []) as watch:
        assert not watch._thread.is_alive()


@pytest.mark.parametrize("driver", ["decides nothing", "has failed", "is gone"])
def test_decision_is_waited_for_as_long_as_the_driver_answers(
    driver: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The host is silent for longer than a driver that is gone itself is waited for."""
    target = Target(0, "worker:0", "grpc://127.0.0.1:1")
    looks = 0

    def knock(target: Target) -> str:
        nonlocal looks
        looks += 1
        return "silent" if looks <= 10 else "accepts"

    def fetch_cause(*coordinator: object) -> str:
        if driver == "is gone":
            raise OSError("no route")
        return "it broke" if driver == "has failed" and looks == 5 else ""

    monkeypatch.setattr(link_watch, "knock", knock)
    monkeypatch.setattr(link_watch, "fetch_cause", fetch_cause)
    monkeypatch.setattr(link_watch, "_VERDICT_LOOK_S", 0.15)
    spec = FeedSpec("f", 0, "run", (target,), TOKEN, timeout_s=SOON_S, host_timeout_s=0.5)
    monkeypatch.setattr(link_watch, "_SILENT_S", 1.2)
    caplog.set_level(logging.WARNING)
    cause = link_watch.await_decision(spec, [target], RuntimeError("worker:0: no word"))
    assert cause == ("it broke" if driver == "has failed" else "")
    if driver != "is gone":
        assert ("worker:0: no word" in caplog.text) == (driver == "decides nothing")
    if driver == "is gone":
        assert looks < 10
    else:
        assert looks == (11 if driver == "decides nothing" else 5)
