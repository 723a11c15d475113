"""What changes often is passed on at once after a rest, and its last change always."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from sparkdl.core.throttle import Throttle, period_s

PERIOD_S = 10.0


class Loop:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self._timers: list[tuple[float, Callable[[], None], asyncio.TimerHandle]] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, wait_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        at_s = self.now_s + wait_s
        handle = asyncio.TimerHandle(at_s, call, (), cast(asyncio.AbstractEventLoop, self))
        self._timers.append((at_s, call, handle))
        return handle

    def pass_by(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while due := [timer for timer in self._timers if timer[0] <= until_s]:
            self._timers.remove(due[0])
            self.now_s, call, handle = due[0]
            if not handle.cancelled():
                call()
        self.now_s = until_s

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Take notice, as loops do."""


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def calls() -> list[float]:
    return []


@pytest.fixture
def throttle(loop: Loop, calls: list[float]) -> Throttle:
    as_loop = cast(asyncio.AbstractEventLoop, loop)
    return Throttle(as_loop, lambda: calls.append(loop.now_s - 1000.0), PERIOD_S)


def test_the_first_request_is_served_at_once_and_later_ones_together(
    loop: Loop, calls: list[float], throttle: Throttle
) -> None:
    for _ in range(5):
        throttle.request()
        loop.pass_by(1)
    assert calls == [0]
    loop.pass_by(100)
    assert calls == [0, 10], "and no more: there was no request since"
    throttle.request()
    assert calls == [0, 10, 105]


def test_call_or_cancel_drops_one_due(loop: Loop, calls: list[float], throttle: Throttle) -> None:
    throttle.request()
    loop.pass_by(1)
    throttle.request()
    throttle.call()
    loop.pass_by(1)
    throttle.request()
    loop.pass_by(100)
    assert calls == [0, 1, 11]
    throttle.request()
    throttle.request()
    throttle.cancel()
    throttle.cancel()
    loop.pass_by(100)
    assert calls == [0, 1, 11, 102]


def test_a_request_within_the_action_is_served_after_a_rest(loop: Loop) -> None:
    calls: list[float] = []

    def act() -> None:
        calls.append(loop.now_s - 1000.0)
        if len(calls) < 3:
            slow.request()

    slow = Throttle(cast(asyncio.AbstractEventLoop, loop), act, PERIOD_S)
    slow.request()
    loop.pass_by(100)
    assert calls == [0, 10, 20]


def test_many_nodes_report_more_seldom_so_that_the_driver_hears_as_often() -> None:
    assert [period_s(0.1, nodes) for nodes in (1, 30, 1500, 9000)] == [0.1, 0.1, 5.0, 30.0]
