"""Where rows lie and whose they are: each row once, all nodes level, and nobody starves."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import example, given, strategies as st

from sparkdl.control.messages import AssignedRange, SpooledRange
from sparkdl.driver.feeds.table import FIRST_GRACE_S, GRACE_S, WINDOW_NBYTES, RowTable, level

TOTALS = st.lists(st.integers(0, 60), min_size=1, max_size=8)
SHORT = 0
ROOM_NBYTES = 4000
"""A window of 1,000 rows of one byte."""


def pour_one_by_one(num_rows: int, totals: list[int]) -> list[int]:
    shares = [0] * len(totals)
    for _ in range(num_rows):
        # The lowest now; among equals, the node that was lowest at first, then the lower index.
        lowest = min(range(len(totals)), key=lambda n: (totals[n] + shares[n], totals[n], n))
        shares[lowest] += 1
    return shares


@given(st.integers(0, 200), TOTALS)
def test_level_is_as_giving_each_row_to_the_lowest_node(num_rows: int, totals: list[int]) -> None:
    assert level(num_rows, totals) == pour_one_by_one(num_rows, totals)


def piece(number: int, start: int, rows: int, partition: int = 0) -> SpooledRange:
    return SpooledRange(number, partition, start, 0, rows, rows)


def rows_of(assigned: Sequence[AssignedRange]) -> list[tuple[int, int]]:
    found = [(p, i) for each in assigned for p, *ends in each.parts for i in range(*ends)]
    assert len(found) == sum(each.rows for each in assigned)
    return found


def test_rows_of_the_own_agent_come_first_and_do_not_wait() -> None:
    table = RowTable({}, {})
    table.add(0, [piece(0, 0, 10)], ROOM_NBYTES, 0.0)
    table.add(1, [piece(0, 10, 8)], ROOM_NBYTES, 0.0)
    assert table.assign({0: SHORT, 1: SHORT}, 0.0) == {
        0: [AssignedRange(0, 0, 0, 8, ((0, 0, 8),))],
        1: [AssignedRange(1, 0, 0, 8, ((0, 10, 18),))],
    }
    assert (table.rows_waiting, table.rows_moved) == (2, 0)
    assert table.assign_rest([0, 1]) == {
        0: [AssignedRange(0, 0, 8, 1, ((0, 8, 9),))],
        1: [AssignedRange(0, 0, 9, 1, ((0, 9, 10),))],
    }


def test_rows_of_another_agent_come_after_a_moment() -> None:
    table = RowTable({}, {})
    table.add(0, [piece(0, 0, 10)], ROOM_NBYTES, 5.0)
    assert table.assign({0: SHORT, 1: SHORT}, 5.0) == {}
    assert table.due_s == 5.0 + FIRST_GRACE_S
    assigned = table.assign({0: SHORT, 1: SHORT}, table.due_s)
    assert table.assigned == {0: 5, 1: 5}
    rows = rows_of([*itertools.chain(*assigned.values())])
    assert sorted(rows) == [(0, row) for row in range(10)]
    assert math.isinf(table.due_s)


def test_node_waits_for_its_own_rows_anew_each_time_and_longer_once_all_have_some() -> None:
    table = RowTable({}, {})
    table.add(0, [piece(0, 0, 10)], ROOM_NBYTES, 0.0)
    table.assign_rest([0])
    table.add(0, [piece(1, 10, 10)], ROOM_NBYTES, 5.0)
    assert table.assign({0: SHORT, 1: SHORT}, 5.0) == {}
    assert table.due_s == 5.0 + FIRST_GRACE_S, "node 1 has had none yet"
    table.add(1, [piece(0, 20, 20)], ROOM_NBYTES, 5.02)
    table.assign({0: SHORT, 1: SHORT}, 5.02)
    assert table.assigned == {0: 20, 1: 20}
    table.add(0, [piece(2, 40, 20)], ROOM_NBYTES, 9.0)
    assert table.assign({0: SHORT, 1: SHORT}, 9.0) == {}
    assert table.due_s == 9.0 + GRACE_S


def test_rows_are_assigned_once_a_node_has_read_half_of_its_window() -> None:
    table = RowTable({}, {})
    table.add(0, [piece(0, 0, 1000)], ROOM_NBYTES, 0.0)
    assert table.assign({0: 500}, 0.0) == {}
    assert len(rows_of(table.assign({0: 499}, 0.0)[0])) == 501


def test_rows_ahead_count_and_rows_done_do_not_come_again() -> None:
    table = RowTable({0: 3}, {0: ((0, 5),)})
    assert table.add(0, [piece(0, 0, 10)], ROOM_NBYTES, 0.0) == [SpooledRange(0, 0, 0, 0, 5)]
    assert table.known == {0: ((0, 10),)}
    table.assign_rest([0, 1])
    assert table.assigned == {0: 1, 1: 4}


def test_rows_that_are_shuffled_are_dealt_once_all_are_here_or_a_spool_is_full() -> None:
    tables = [RowTable({}, {}, Random(seed)) for seed in (1, 2)]
    for table in tables:
        for agent in range(2):
            table.add(agent, [piece(0, 1000 * agent, 1000)], ROOM_NBYTES, 0.0)
        assert table.assign({0: SHORT, 1: SHORT}, 99.0) == {}
    dealt = [{n: rows_of(some) for n, some in t.assign_rest([0, 1]).items()} for t in tables]
    for deal in dealt:
        assert {node: len(rows) for node, rows in deal.items()} == {0: 1000, 1: 1000}
        assert sorted(deal[0] + deal[1]) == [(0, row) for row in range(2000)]
        for rows in deal.values():
            assert 250 < sum(row < 1000 for _, row in rows) < 750, "rows of both agents"
    assert dealt[0] != dealt[1]
    full = RowTable({}, {}, Random(1))
    full.add(0, [piece(0, 0, 1000)], ROOM_NBYTES, 0.0)
    full.add(0, [], ROOM_NBYTES, 0.0, is_full=True)
    assigned = full.assign({0: SHORT, 1: SHORT}, 0.0)
    assert {n: sum(each.rows for each in some) for n, some in assigned.items()} == {0: 500, 1: 500}


def fed_at(*periods_s: float) -> tuple[RowTable, int]:
    """Give agents a segment now and then, of nodes that read rows at once; return the most waiting.

    Args:
        periods_s: by agent, between two segments, about.
    """
    table, random, seconds, most = RowTable({}, {}), Random(1), 30.0, 0
    needs, comes = dict.fromkeys(range(len(periods_s)), 0), []
    for agent, period_s in enumerate(periods_s):
        at_s = random.random()
        while at_s < seconds:
            comes.append((at_s, agent))
            at_s += period_s * (0.5 + random.random())
    turns = itertools.pairwise([*sorted(comes), (seconds, 0)])
    for number, ((now_s, agent), (next_s, _)) in enumerate(turns):
        new = SpooledRange(number, agent, 2500 * number, 0, 2500, 8 << 20)
        table.add(agent, [new], 1 << 30, now_s)
        table.assign(needs, now_s)
        while table.due_s < next_s:
            table.assign(needs, table.due_s)
        most = max(most, table.rows_waiting)
    return table, most


@pytest.mark.parametrize("nodes", [2, 8])
def test_nodes_wait_for_their_own_rows_while_these_come(nodes: int) -> None:
    """Although other agents have rows: by and by each agent gets as many."""
    table, _ = fed_at(*[0.25] * nodes)
    rows = sum(table.assigned.values()) + table.rows_waiting
    assert table.rows_moved <= 0.05 * rows


def test_agent_that_gets_few_rows_does_not_hold_up_the_others() -> None:
    window = 2500 * WINDOW_NBYTES // (8 << 20)
    for periods_s in ((0.05, 0.4), (0.05, 99.0), (0.05, 0.4, 0.05, 99.0)):
        table, most = fed_at(*periods_s)
        assert most <= (window + 2500) * len(periods_s)
        assert max(table.assigned.values()) - min(table.assigned.values()) <= 1


def test_what_is_withdrawn_is_named_by_agent() -> None:
    table = RowTable({}, {})
    table.add(1, [piece(0, 0, 4), piece(1, 4, 4)], ROOM_NBYTES, 0.0)
    table.assign({1: SHORT}, 0.0)
    assert table.withdraw() == {}
    table.add(1, [piece(2, 8, 4)], ROOM_NBYTES, 0.0)
    assert table.withdraw() == {1: [SpooledRange(2, 0, 8, 0, 4)]}
    assert table.rows_waiting == 0
    assert table.is_complete({0: 12, 1: 0})
    assert not table.is_complete({0: 13})


@dataclass
class Training:
    """Feeders, agents with small spools, and nodes that read."""

    random: Random
    speeds: list[int]
    """Rows that each node reads in a moment; 0 for one that stands still."""
    is_in_step: bool
    partitions: list[tuple[int, int]]
    """The agent, and the rows, of each."""
    is_shuffled: bool = False
    now_s: float = 0.0
    spooled: Counter[int] = field(default_factory=Counter)
    read: Counter[int] = field(default_factory=Counter)
    got: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table = RowTable({}, {}, self.random if self.is_shuffled else None)

    def run(self) -> None:
        """Feed all rows within a number of moments that a fair share of the work takes."""
        room, numbers, brought = 200, itertools.count(), [0] * len(self.partitions)
        quiet = 0
        while self.table.rows_waiting or any(
            done < rows for done, (_, rows) in zip(brought, self.partitions, strict=True)
        ):
            moved = False
            order = [*enumerate(self.partitions)]
            self.random.shuffle(order)
            for part, (agent, rows) in order:
                some = min(rows - brought[part], 1 + self.random.randrange(30))
                if some and self.spooled[agent] + some <= room:
                    self.spooled[agent] += some
                    new = piece(next(numbers), brought[part], some, part)
                    self.table.add(agent, [new], ROOM_NBYTES // 10, self.now_s)
                    brought[part] += some
                    moved = True
                elif some:
                    self.table.add(agent, [], ROOM_NBYTES // 10, self.now_s, is_full=True)
            self.take(self.table.assign(self.needs(), self.now_s))
            moved |= self.train()
            if all(done == rows for done, (_, rows) in zip(brought, self.partitions, strict=True)):
                self.take(self.table.assign_rest(range(len(self.speeds))))
            self.now_s += 0.01
            quiet = 0 if moved else quiet + 1
            assert quiet < 80, "rows wait in spools, and nodes for rows"

    def needs(self) -> dict[int, int]:
        return {n: self.table.assigned[n] - self.read[n] for n in range(len(self.speeds))}

    def take(self, assigned: dict[int, list[AssignedRange]]) -> None:
        for each in itertools.chain(*assigned.values()):
            self.spooled[each.holder] -= each.rows
            self.got.extend(rows_of([each]))

    def train(self) -> bool:
        unread = self.needs()
        if self.is_in_step:
            speed = max(self.speeds)
            steps = {n: min(speed, min(unread.values())) for n in unread}
        else:
            steps = {n: min(self.speeds[n], unread[n]) for n in unread}
        self.read.update(steps)
        return any(steps.values())


PARTITIONS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 400)), max_size=12)


@given(
    st.integers(0, 1 << 32),
    st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    st.booleans(),
    PARTITIONS,
    st.booleans(),
)
@example(0, [10, 0], False, [(0, 400)] * 5, False)  # all partitions on one host, one node stopped
@example(0, [10, 10, 10], True, [(0, 1), (1, 1000), (2, 0), (0, 37), (1, 0), (2, 3)], False)
def test_each_row_has_one_node_and_none_waits_in_vain(
    seed: int,
    speeds: list[int],
    is_in_step: bool,
    partitions: list[tuple[int, int]],
    is_shuffled: bool,
) -> None:
    """However small the spools are, wherever the rows come, and if a node stands still."""
    placed = [(agent % len(speeds), rows) for agent, rows in partitions]
    training = Training(Random(seed), speeds, is_in_step, placed, is_shuffled)
    training.run()
    every = [(part, row) for part, (_, rows) in enumerate(placed) for row in range(rows)]
    assert sorted(training.got) == every
    totals = [training.table.assigned[n] for n in range(len(speeds))]
    if is_in_step:
        assert max(totals) - min(totals) <= 1
