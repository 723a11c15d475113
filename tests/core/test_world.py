"""A world puts trainers first, the chief before them, and counts the ranks of each host."""

from __future__ import annotations

import random

from hypothesis import given, strategies as st

from sparkdl.core.options import Roles
from sparkdl.core.spec import NodeSpec, plan_nodes
from sparkdl.core.world import Address, World, build_world


def world_of(nodes: tuple[NodeSpec, ...], hosts: list[str], seed: int = 0) -> World:
    order = list(nodes)
    random.Random(seed).shuffle(order)
    return build_world(
        3, {n: Address(hosts[n.node_id], 100 + n.node_id, f"grpc://{n.node_id}") for n in order}
    )


# ps ps chief evaluator worker worker
NODES = plan_nodes(6, Roles(ps=2, chief="chief", evaluator=True))


def test_cluster_spec_lists_addresses_by_index_whatever_the_ranks() -> None:
    assert world_of(NODES, ["a", "b", "a", "::1", "a", "b"]).cluster_spec() == {
        "ps": ["a:100", "b:101"],
        "chief": ["a:102"],
        "evaluator": ["[::1]:103"],
        "worker": ["a:104", "b:105"],
    }


@given(
    st.integers(0, 3), st.integers(1, 5), st.booleans(), st.booleans(), st.integers(0, 9), st.data()
)
def test_every_world_is_in_order_whoever_came_first(
    num_ps: int, num_workers: int, chief: bool, evaluator: bool, seed: int, data: st.DataObject
) -> None:
    num_nodes = num_ps + num_workers + chief + evaluator
    nodes = plan_nodes(
        num_nodes, Roles(ps=num_ps, chief="chief" if chief else None, evaluator=evaluator)
    )
    hosts = data.draw(st.lists(st.sampled_from("abc"), min_size=num_nodes, max_size=num_nodes))
    world = world_of(nodes, hosts, seed)
    assert world == world_of(nodes, hosts, seed + 1)
    assert {member.node for member in world.members} == set(nodes)
    assert [member.rank for member in world.members] == list(range(num_nodes))
    is_trainer = [member.role.is_trainer for member in world.members]
    assert is_trainer == sorted(is_trainer, reverse=True)
    assert not any(member.role.is_chief for member in world.members[1:])
    for host in set(hosts):
        local = [member.local_rank for member in world.members if member.host == host]
        assert local == list(range(len(local)))
    for job, addresses in world.cluster_spec().items():
        of_job = [node.node_id for node in nodes if node.role.name == job]
        assert addresses == [f"{hosts[node_id]}:{100 + node_id}" for node_id in of_job]
