"""The notice of an executor's end turns `ctx.is_draining` true at the same call on all nodes."""

from __future__ import annotations

import random
import threading
from functools import partial
from queue import SimpleQueue

import pytest

from sparkdl.control.messages import AllGathered, Drain, Gather
from sparkdl.node import link
from sparkdl.node.link import DrainNotice
from tests.doubles.feeds import SOON_S, Running


class Nodes:
    """Some nodes, whose reports are put together as the driver does."""

    def __init__(self, count: int) -> None:
        self.reports: list[SimpleQueue[Gather]] = [SimpleQueue() for _ in range(count)]
        self.notices = [DrainNotice(reports.put) for reports in self.reports]

    def settle(self, number: int) -> None:
        values = []
        for reports in self.reports:
            report = reports.get(timeout=SOON_S)
            assert (report.generation, report.number) == (0, number)
            values.append(report.value)
        for notice in self.notices:
            notice.settle(AllGathered(0, number, tuple(values), ""))


def test_nodes_at_different_calls_are_asked_at_the_call_after_the_largest() -> None:
    nodes = Nodes(2)
    ahead, behind = nodes.notices
    assert not any(ahead.is_due() for _ in range(3))
    assert not behind.is_due()
    for notice in nodes.notices:
        notice.hear(Drain(0, -1))
    nodes.settle(-1)
    assert ahead.is_due()
    assert [behind.is_due() for _ in range(3)] == [False, False, True]


def test_call_waits_for_the_reports_of_nodes_that_have_not_heard() -> None:
    nodes = Nodes(2)
    nodes.notices[0].hear(Drain(0, -1))
    asks = Running(nodes.notices[0].is_due)
    assert asks.still_runs(0.1)
    assert not nodes.notices[1].is_due()  # it trains: the other may be waiting in a collective
    nodes.notices[1].hear(Drain(0, -1))
    nodes.settle(-1)
    assert asks.result() is False
    assert [notice.is_due() for notice in nodes.notices] == [True, True]


def test_nodes_of_which_one_has_returned_are_not_asked() -> None:
    notice = DrainNotice(lambda report: None)
    notice.hear(Drain(0, -1))
    notice.settle(AllGathered(0, -1, (), "worker:1 returned from map_fun without it"))
    assert not notice.is_due()


def test_driver_that_does_not_answer_holds_no_training_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "_ANSWER_S", 0.1)
    notice = DrainNotice(lambda report: None)
    notice.hear(Drain(0, -1))
    assert not notice.is_due()
    assert not notice.is_due()


@pytest.mark.parametrize("seed", range(5))
def test_nodes_in_step_always_agree(seed: int) -> None:
    """Each step waits for all nodes, as training does; notices come at any moment."""
    count, chance, heard = 3, random.Random(seed), threading.Event()
    nodes, asked = Nodes(count), [[0] * 0 for _ in range(count)]
    left = [5]  # steps after the last notice

    def count_down() -> None:
        left[0] -= heard.is_set()

    step_end = threading.Barrier(count, count_down)
    checkpoint = threading.Barrier(count)

    def train(rank: int) -> None:
        step = 0
        while left[0]:
            if nodes.notices[rank].is_due():
                asked[rank].append(step)
                checkpoint.wait(SOON_S)
                nodes.notices[rank].clear()
            step_end.wait(SOON_S)
            step += 1

    running = [Running(partial(train, rank)) for rank in range(count)]
    for number in (-1, -2, -3):
        for rank in chance.sample(range(count), count):
            nodes.notices[rank].hear(Drain(0, number))
        nodes.settle(number)
    heard.set()
    for each in running:
        each.result()
    assert asked[0] == asked[1] == asked[2]
    assert asked[0]
