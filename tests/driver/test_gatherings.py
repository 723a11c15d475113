"""When a gathering ends, with whose values, and when it can't."""

from __future__ import annotations

from sparkdl.control.messages import AllGathered, Gather
from sparkdl.core.spec import plan_nodes
from sparkdl.core.world import Address, World, build_world
from sparkdl.driver.gatherings import MAX_GATHERED_NBYTES, Gatherings


def world_of(generation: int = 0, num_nodes: int = 2, **plan: object) -> World:
    nodes = plan_nodes(num_nodes, **plan)  # type: ignore[arg-type]
    return build_world(generation, {node: Address("h", node.node_id, "") for node in nodes})


WORLD = world_of()


def test_values_come_by_rank_once_all_are_there() -> None:
    gatherings = Gatherings()
    world = world_of(num_nodes=3, master_node="chief", eval_node=True)  # ranks: 0, 2; then 1
    assert gatherings.give(world, 2, Gather(0, 0, b"w")) == []
    assert gatherings.give(world, 1, Gather(0, 0, b"evaluator")) == []
    assert gatherings.give(world, 0, Gather(0, 0, b"c")) == [AllGathered(0, 0, (b"c", b"w"))]


def test_a_node_may_be_ahead() -> None:
    gatherings = Gatherings()
    calls = [(0, 0), (0, 1), (1, 0), (1, 1)]
    answers = [gatherings.give(WORLD, node, Gather(0, n, b"%d" % node)) for node, n in calls]
    assert answers == [[], [], *([AllGathered(0, n, (b"0", b"1"))] for n in (0, 1))]


def test_nothing_of_another_world_counts() -> None:
    gatherings, later = Gatherings(), world_of(1)
    assert gatherings.give(WORLD, 0, Gather(0, 0, b"old")) == []
    assert gatherings.leave(WORLD, 1, 0) != []
    assert gatherings.give(later, 1, Gather(0, 0, b"old")) == []
    assert gatherings.leave(later, 1, 0) == []
    assert gatherings.give(later, 1, Gather(1, 0, b"b")) == []
    assert gatherings.give(later, 0, Gather(1, 0, b"a")) == [AllGathered(1, 0, (b"a", b"b"))]


def test_who_waits_for_a_node_that_has_returned_is_told_so() -> None:
    problem = "worker:1 returned from map_fun without it"
    waits_first, returns_first = Gatherings(), Gatherings()
    assert waits_first.give(WORLD, 0, Gather(0, 0, b"")) == []
    assert waits_first.leave(WORLD, 1, 0) == [AllGathered(0, 0, (), problem)]
    assert returns_first.leave(WORLD, 1, 0) == []
    assert returns_first.give(WORLD, 0, Gather(0, 0, b"")) == [AllGathered(0, 0, (), problem)]


def test_a_node_may_return_once_it_has_given() -> None:
    gatherings = Gatherings()
    assert gatherings.give(WORLD, 1, Gather(0, 0, b"b")) == []
    assert gatherings.leave(WORLD, 1, 0) == []
    assert gatherings.give(WORLD, 0, Gather(0, 0, b"a")) == [AllGathered(0, 0, (b"a", b"b"))]


def test_more_than_a_message_can_carry_is_refused() -> None:
    gatherings = Gatherings()
    gatherings.give(WORLD, 0, Gather(0, 0, b"."))
    (answer,) = gatherings.give(WORLD, 1, Gather(0, 0, bytes(MAX_GATHERED_NBYTES)))
    assert answer.values == ()
    assert f"the values take {MAX_GATHERED_NBYTES + 1} bytes" in answer.problem
