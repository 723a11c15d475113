"""Nodes on executors that Spark decommissions leave at a checkpoint, and come back elsewhere. Pure.

    Running    ExecutorsDrain ──▶ Relaunch (elsewhere), Drain (a checkpoint is wanted)
               CheckpointMade ──▶ Stop (leaving nodes), NewRound (the others) ──▶ Gathering

A node leaves once another agent stands by for it, or if `min_nodes` are there without it. Until
then it trains on, because Spark keeps the executor while a task runs there. If the executor ends
earlier, the node is lost like any other, and the other agent takes its seat.
"""

from __future__ import annotations

from dataclasses import replace

from sparkdl.control.messages import Drain
from sparkdl.core.listing import listed
from sparkdl.driver.lifecycle.roster import Agent, Roster
from sparkdl.driver.lifecycle.state import (
    Action,
    ExecutorsDrain,
    ForgetTask,
    R,
    Relaunch,
    Running,
    Send,
    Step,
    Warn,
)


def noted(state: R, event: ExecutorsDrain, now_s: float) -> Step[R]:
    """Start the nodes on these executors elsewhere as well, and ask for a checkpoint."""
    before = state.roster
    roster = replace(before, draining=before.draining | event.executors)
    after = replace(state, roster=roster)
    new = [agent for agent in _drained(roster) if not before.drains(agent)]
    if not new:
        return after, []
    nodes = tuple(roster.spec.nodes[agent.hello.node_id] for agent in new)
    names = listed([node.name for node in nodes])
    text = f"Spark decommissions the executors of {names}: all nodes are asked for a checkpoint"
    actions: list[Action] = [Warn(text)]
    # Without restarts no second agent could take the seat.
    if roster.spec.settings.can_restart:
        actions += [*map(ForgetTask, nodes), Relaunch(nodes)]
    return _asked(after, actions) if isinstance(after, Running) else (after, actions)


def leaving(state: Running) -> list[Agent]:
    """Return the agents on such executors if the others can continue at once; else none."""
    roster, settings = state.roster, state.roster.spec.settings
    found, least = _drained(roster), settings.recovery.min_nodes
    if not found or not settings.can_restart:
        return []
    there = {each.hello.node_id for each in roster.standbys if not roster.drains(each)}
    lost = {each.hello.node_id for each in found} - there
    stay = [member.role for member in state.world.members if member.node.node_id not in lost]
    # The others must make a world by themselves: enough nodes, without a lost one that they need,
    # and with one that ends the job.
    can_shrink = (
        least is not None
        and len(stay) >= least
        and all(roster.spec.nodes[node_id].role.is_expendable for node_id in lost)
        and any(role.finishes_job for role in stay)
    )
    return found if not lost or can_shrink else []


def asked_again(state: R) -> Step[R]:
    """Request a checkpoint at which nodes can leave, once their replacements have joined."""
    return _asked(state, []) if isinstance(state, Running) and leaving(state) else (state, [])


def _drained(roster: Roster) -> list[Agent]:
    return [agent for agent in roster.agents.values() if roster.drains(agent)]


def _asked(state: R, actions: list[Action]) -> Step[R]:
    assert isinstance(state, Running)
    roster = replace(state.roster, drain_notices=state.roster.drain_notices + 1)
    # Negative, because the calls of `ctx.all_gather` have the numbers from 0 on.
    notice = Drain(state.world.generation, -roster.drain_notices)
    trainers = [m.node.node_id for m in state.world.trainers if not m.role.is_server]
    return replace(state, roster=roster), [
        *actions,
        *(Send(roster.agents[n].agent_id, notice) for n in trainers if n in roster.agents),
    ]
