"""What comes of what nodes send: values of gatherings, parts of checkpoints."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st

from sparkdl.control import messages as msg
from sparkdl.control.messages import AllGathered, CheckpointDone, CheckpointPart, Gather
from sparkdl.control.rows import EpochRows, FeedCoverage
from sparkdl.core.options import Roles
from sparkdl.core.spec import plan_nodes
from sparkdl.core.world import Address, CheckpointRef, World, build_world
from sparkdl.driver.collect import MAX_GATHERED_NBYTES, Checkpoints, Gatherings
from sparkdl.driver.feeds.coverage import CoverageStore
from sparkdl.node.checkpoint_store import Manifest


def world_of(generation: int = 0, num_nodes: int = 2, **plan: object) -> World:
    is_coordinated = bool(plan.pop("is_coordinated", False))
    nodes = plan_nodes(num_nodes, Roles(**plan), is_coordinated)  # type: ignore[arg-type]
    return build_world(generation, {node: Address("h", node.node_id, "") for node in nodes})


WORLD = world_of()


def test_values_come_by_rank_once_all_are_there() -> None:
    gatherings = Gatherings()
    world = world_of(num_nodes=3, chief="chief", evaluator=True)  # ranks: 0, 2; then 1
    assert gatherings.give(world, 2, Gather(0, 0, b"w")) == []
    assert gatherings.give(world, 1, Gather(0, 0, b"evaluator")) == []
    assert gatherings.give(world, 0, Gather(0, 0, b"c")) == [AllGathered(0, 0, (b"c", b"w"))]


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


AT_S = 1e9


def part(step: int, generation: int = 0, problem: str = "") -> CheckpointPart:
    return CheckpointPart(generation, step, {}, problem)


def told(
    checkpoints: Checkpoints, *calls: tuple[int, CheckpointPart], world: World = WORLD
) -> list[msg.CheckpointCommit | None]:
    """Hand in parts by node id; return what the first node was told after each."""
    words = [checkpoints.part(world, node_id, said, AT_S) for node_id, said in calls]
    assert {word[0] for word in words if word} <= {world.members[0].node.node_id}
    return [word[1] if word else None for word in words]


def manifest_of(word: msg.CheckpointCommit | None) -> Manifest:
    assert word is not None
    return msgspec.json.decode(word.manifest, type=Manifest)


def test_parts_of_all_make_a_manifest_and_the_first_hears_who_is_awaited() -> None:
    waiting, complete = told(Checkpoints("c", CoverageStore()), (0, part(5)), (1, part(5)))
    assert waiting == msg.CheckpointCommit(0, 5, missing=("worker:1",))
    assert manifest_of(complete) == Manifest(5, "c", 0, AT_S, ("worker:0", "worker:1"), {})


def test_only_nodes_that_run_map_fun_and_train_are_awaited() -> None:
    coordinated = world_of(num_nodes=4, ps=1, chief="chief", evaluator=True, is_coordinated=True)
    chief, *others = [member.node.node_id for member in coordinated.members]
    checkpoints = Checkpoints("c", CoverageStore())
    (word,) = told(checkpoints, (chief, part(1)), world=coordinated)
    assert manifest_of(word).nodes == ("chief:0",)
    for other in others:
        assert told(checkpoints, (other, part(1)), world=coordinated) == [None]


@pytest.mark.parametrize(
    ("calls", "problem"),
    [
        ([(0, part(5)), (1, part(6))], "worker:1 has called ctx.checkpoint(6) without"),
        ([(1, part(6)), (0, part(5))], "worker:1 has called ctx.checkpoint(6) without"),
        ([(1, part(5)), (0, part(6))], "worker:0 has called ctx.checkpoint(6) without"),
        ([(0, part(5)), (1, part(5, problem="OSError: full"))], "worker:1 could not write its"),
        ([(1, part(5, problem="OSError: full")), (0, part(5))], "its part: OSError: full"),
    ],
)
def test_first_node_hears_why_it_waits_in_vain(
    calls: list[tuple[int, CheckpointPart]], problem: str
) -> None:
    word = told(Checkpoints("c", CoverageStore()), *calls)[-1]
    assert word is not None
    assert problem in word.problem
    assert not word.manifest


def test_checkpoint_counts_when_it_is_done_and_the_feeds_hear_what_it_covers() -> None:
    coverage = CoverageStore()
    checkpoints = Checkpoints("c", coverage)
    used: list[EpochRows] = [{1: {0: ((5 * n, 5 * n + 3),)}} for n in (0, 1)]
    covered = {"parquet:0": FeedCoverage(0, {0: {1: {0: ((0, 3), (5, 8))}}})}
    calls = [(n, CheckpointPart(0, 5, {"parquet:0": used[n]})) for n in (0, 1)]
    assert manifest_of(told(checkpoints, *calls)[-1]).feeds == covered
    assert checkpoints.done(0, CheckpointDone(0, 6, "url")) is None, "nobody was told to"
    assert not coverage.coverage(0, {})
    assert checkpoints.done(0, CheckpointDone(0, 5, "url")) == CheckpointRef("url", 5, 0)
    assert coverage.coverage(0, {}) == covered
    assert checkpoints.done(0, CheckpointDone(0, 5, "url")) is None, "once is enough"


def test_nothing_of_an_older_world_counts() -> None:
    checkpoints, second = Checkpoints("c", CoverageStore()), world_of(1)
    told(checkpoints, (0, part(5)), (1, part(5)), (1, part(7)))
    assert told(checkpoints, (1, part(5, generation=0)), world=second) == [None]
    assert checkpoints.done(1, CheckpointDone(0, 5, "url")) is None
    words = told(checkpoints, (0, part(5, 1)), (1, part(5, 1)), world=second)
    assert manifest_of(words[-1]).generation == 1
    assert checkpoints.done(1, CheckpointDone(0, 5, "url")) is None
    assert checkpoints.done(1, CheckpointDone(1, 5, "url")) == CheckpointRef("url", 5, 1)


@given(st.data())
def test_checkpoint_is_complete_once_all_wrote_and_covers_its_own_rows(data: st.DataObject) -> None:
    """Nodes may begin the next one before the first node has completed this one."""
    checkpoints, world, at, complete = Checkpoints("c", CoverageStore()), world_of(0, 3), [0] * 3, 0
    while complete < 4:
        node = data.draw(st.sampled_from([n for n in range(3) if at[n] < (n > 0) + complete + 1]))
        at[node] += 1
        used: EpochRows = {0: {node: ((0, at[node]),)}}
        call = node, CheckpointPart(0, at[node], {"parquet:0": used})
        (word,) = told(checkpoints, call, world=world)
        assert bool(word and word.manifest) == (min(at) > complete)
        if min(at) > complete:
            complete += 1
            covered = {0: dict.fromkeys(range(3), ((0, complete),))}
            assert manifest_of(word).feeds["parquet:0"].rows[0] == covered
            checkpoints.done(0, CheckpointDone(0, complete, "url"))
