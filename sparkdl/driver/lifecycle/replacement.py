"""The return of lost nodes, and the task slots they take. Pure.

    detached    Begin ──▶ Detach ──▶ AgentDetached ──▶ ForgetTask

Where the cluster's placement is detached, agents give their slots back: those of a world when it
begins, later joiners as they join.
"""

from __future__ import annotations

from dataclasses import replace

from sparkdl.control.messages import Detach, Stop
from sparkdl.core.failure import Failure
from sparkdl.driver.lifecycle.roster import Roster
from sparkdl.driver.lifecycle.state import (
    Action,
    AgentDetached,
    AgentJoined,
    Failing,
    ForgetTask,
    Gathering,
    R,
    Relaunch,
    Running,
    Send,
    State,
    Step,
    Warn,
)


def continues_without(state: Running, failure: Failure) -> Step[Running] | None:
    """Return the next state if the others continue; `None` if this failure affects all nodes."""
    node = state.roster.spec.nodes[failure.node_id]
    if node.role.is_needed:
        return None
    after = replace(
        state, in_map_fun=state.in_map_fun - {node.node_id}, left=state.left | {node.node_id}
    )
    return after, [Warn(f"the training goes on without {node.name}: {failure.describe()}")]


def relaunch(state: State) -> list[Action]:
    """Bring missing nodes back, if they were there before."""
    if not isinstance(state, (Gathering, Running)) or not has_begun(state):
        return []
    left = state.left if isinstance(state, Running) else ()
    wanted = tuple(node for node in state.roster.wanted() if node.node_id not in left)
    return [Relaunch(wanted)] if wanted else []


def has_begun(state: Gathering | Running) -> bool:
    """Whether nodes that are missing were there before, and are to come back."""
    # Until the first world the job of the launch itself still brings the missing nodes.
    is_first = isinstance(state, Gathering) and not state.failures and state.world is None
    return not is_first and state.roster.spec.settings.can_restart


def is_too_many(state: Gathering | Running | Failing, event: AgentJoined) -> bool:
    """Whether an agent is to go at once: it would take a slot, and is not needed.

    Its node has an agent that is detached or belongs to another task. The latter happens where
    Spark kills an executor while its tasks end in order: Spark repeats some of them, and a relaunch
    brings the same nodes.
    """
    roster, node_id = state.roster, event.hello.node_id
    holder = roster.agents.get(node_id)
    if holder is None:
        return False
    if roster.drains(holder):  # its successor; one is enough
        standbys = {agent.hello.node_id for agent in roster.standbys}
        return node_id in standbys or event.hello.executor in roster.draining
    return holder.is_detached or holder.hello.task != event.hello.task


def refused(state: R, event: AgentJoined) -> Step[R]:
    """Stop a surplus agent in order, so that Spark does not repeat its task."""
    hello, nodes = event.hello, state.roster.spec.nodes
    task = [ForgetTask(nodes[hello.node_id])] if 0 <= hello.node_id < len(nodes) else []
    return state, [Send(hello.agent_id, Stop(0.0)), *task]


def detach(roster: Roster, agent_id: str | None = None) -> list[Action]:
    """Make one agent or all give their slots back, if the placement is detached.

    Agents on decommissioned executors keep their slots: no other task can have them, and Spark ends
    such an executor as soon as it has no task.
    """
    return [
        Send(agent.agent_id, Detach())
        for agent in roster.agents.values()
        if roster.spec.placement == "detached" and agent.holds_slot and not roster.drains(agent)
        if agent_id in (None, agent.agent_id)
    ]


def detached(state: R, event: AgentDetached, now_s: float) -> Step[R]:
    """Record that an agent's task ends, and stop its standbys: they would only hold a slot.

    They are not stopped earlier: when the first attempt of a task has ended, Spark ends the others.
    """
    node_id = state.roster.node_of(event.agent_id)
    if node_id is None:
        return state, []
    roster = state.roster.detached(event.agent_id)
    standbys = () if roster.drains(roster.agents[node_id]) else roster.standbys
    idle = [agent for agent in standbys if agent.hello.node_id == node_id]
    ends = [Send(agent.agent_id, Stop(0.0)) for agent in idle]
    return replace(state, roster=roster), [ForgetTask(roster.spec.nodes[node_id]), *ends]
