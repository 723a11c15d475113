"""Nodes that begin anew by themselves while the others go on: roles whose failure is `alone`. Pure.

Runs in: driver

    ChildBroke ──▶ NewRound(generation, is_again) ──▶ Offer ──▶ Begin(world)

An evaluator may come back anywhere. A worker of parameter servers has to come back at its address,
where the chief finds it, and without having lost rows that it was fed; otherwise all begin anew.
"""

from __future__ import annotations

from dataclasses import replace

from sparkdl.control.messages import Begin, NewRound, Offer
from sparkdl.core.failure import Failure
from sparkdl.core.spec import InputMode, NodeSpec
from sparkdl.driver.lifecycle.policy import History, Restart, decide
from sparkdl.driver.lifecycle.roster import Roster
from sparkdl.driver.lifecycle.state import Action, Failing, Relaunch, Running, Send, Step, Warn


def goes_on_without(state: Running, failure: Failure, now_s: float) -> Step | None:
    """Return what follows if the others go on; `None` if this is the failure of all.

    Args:
        state: in which the node's agent, if that was lost, is gone already.
    """
    roster = state.roster
    node = roster.spec.nodes[failure.node_id]
    if not may_fail_alone(roster, node):
        return None
    past = roster.alone.get(node.node_id, History())
    decision = decide((failure,), past, roster.spec.settings, now_s)
    agent = roster.agents.get(node.node_id)
    rest = replace(state, in_map_fun=state.in_map_fun - {node.node_id})
    if not isinstance(decision, Restart):
        if node.role.is_needed:
            return None
        why = f" ({decision.reason})" if decision.reason else ""
        text = f"The training goes on without {node.name}{why}: {failure.describe()}"
        return replace(rest, left=state.left | {node.node_id}), [Warn(text)]
    if agent is None and node.role.is_server:
        return None
    past = replace(past, restarts_s=(*past.restarts_s, now_s), cause=failure)
    alone = {**roster.alone, node.node_id: past}
    after = replace(rest, roster=replace(roster, alone=alone), alone=state.alone | {node.node_id})
    actions: list[Action] = [Warn(f"{node.name} alone: {decision.reason}")]
    if agent is None:
        return after, [*actions, Relaunch((node,))]
    return after, [*actions, Send(agent.agent_id, NewRound(state.world.generation, True))]


def may_fail_alone(roster: Roster, node: NodeSpec) -> bool:
    """Whether the others may go on if this node fails."""
    is_fed = node.role.is_fed and roster.spec.input_mode is InputMode.SPARK
    return node.role.failure == "alone" and not is_fed


def offered_alone(state: Running, agent_id: str, offer: Offer, now_s: float) -> Step | None:
    """Return what follows if this is the child that a node alone is to go on with."""
    node_id = state.roster.node_of(agent_id)
    if node_id not in state.alone or offer.generation != state.world.generation:
        return None
    address = state.roster.agents[node_id].address(offer.generation)
    member = state.world.member(node_id)
    assert address is not None
    if member.role.is_server and (address.host, address.port) != (member.host, member.port):
        cause = state.roster.alone[node_id].cause
        assert cause is not None
        return Failing(state.roster, state.world, state.returned, (cause,), now_s), []
    world = state.world.moved(node_id, address)
    after = replace(state, world=world, alone=state.alone - {node_id})
    return after, [Send(agent_id, Begin(world, state.roster.resume))]
