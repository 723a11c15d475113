"""The life of a cluster as the coordinator sees it. Pure: no sockets, threads, clocks or Spark.

`step(state, event, now_s)` returns the next state and the actions that the controller has to
perform. All transitions are in `TRANSITIONS`; docs/design.md draws them, from the handlers' types.
A pair that is not there is a bug and raises `IllegalTransitionError`. States, events and actions
are in `driver/lifecycle/state.py`.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from sparkdl.control.messages import Begin, Detach, NewRound, Stop, StopChild, ToAgent
from sparkdl.core.errors import ReservationTimeoutError
from sparkdl.core.failure import Failure
from sparkdl.core.spec import ClusterSpec, NodeSpec
from sparkdl.core.state_machine import stay, transition
from sparkdl.core.texts import count, listed
from sparkdl.core.world import CheckpointRef
from sparkdl.driver.lifecycle.policy import Fail, Retry, decide
from sparkdl.driver.lifecycle.state import (
    Action,
    Agent,
    AgentDetached,
    AgentJoined,
    AgentLeft,
    AgentReady,
    AgentRegistry,
    CheckpointCompleted,
    ChildEntered,
    DeadlinePassed,
    Event,
    Failed,
    Failing,
    FailureReported,
    Finished,
    ForgetTask,
    Gathering,
    LaunchFailed,
    NodesBlamed,
    R,
    Relaunch,
    Release,
    Report,
    ResultReported,
    Running,
    S,
    Send,
    State,
    Step,
    Stopped,
    Stopping,
    StopRequested,
    Warn,
    node_failure,
)

U = TypeVar("U", bound=Gathering | Running | Failing)


def begin(spec: ClusterSpec, now_s: float, checkpoint: CheckpointRef | None = None) -> Gathering:
    registry = AgentRegistry(spec, checkpoint=checkpoint)
    return Gathering(registry, 0, now_s + spec.settings.start_timeout_s)


def step(state: State, event: Event, now_s: float) -> Step[State]:
    """Return the state after `event`, and the actions to perform."""
    return transition(TRANSITIONS, state, event, now_s)


def _to_all(registry: AgentRegistry, message: ToAgent) -> list[Action]:
    agents = [*registry.agents.values(), *registry.standbys]  # a standby may become a node
    return [Send(agent.agent_id, message) for agent in agents]


def _try_begin(state: Gathering, may_be_small: bool = False) -> Step[Gathering | Running]:
    """Begin the world if every node has a ready child for this generation."""
    registry = state.registry
    if state.is_growth:
        children = [agent.child for agent in registry.agents.values()]
        have_all = all(child and child.generation == state.generation for child in children)
        may_be_small = may_be_small or have_all
    world = registry.world(state.generation, may_be_small)
    if world is None:
        return state, []
    names = {node.name for node in registry.spec.nodes} - {m.node.name for m in world.members}
    size = f"{world.size} of {len(registry.spec.nodes)}" if names else f"{world.size}"
    hosts = count(len({member.host for member in world.members}), "host")
    text = f"generation {world.generation} started with {size} nodes on {hosts}"
    members = {member.node.node_id for member in world.members}
    message = Begin(world, registry.resume)  # one for all: it is long, and is encoded once
    begins: list[Action] = [
        Send(agent.agent_id, message)
        for node_id, agent in registry.agents.items()
        if node_id in members
    ]
    running = Running(registry, world)
    begins += _detach(registry)
    if not names:
        return running, [Report(text), *begins]
    return running, [Warn(f"{text} (missing: {listed(sorted(names))})"), *begins]


def _gathering_joined(state: Gathering, event: AgentJoined, now_s: float) -> Step[Gathering]:
    """Register the agent; it brings a child for generation 0, so ask for a later one."""
    if _is_too_many(state, event):
        return _refused(state, event)
    gathering = replace(state, registry=state.registry.with_agent(Agent(event.hello)))
    if state.generation == 0:
        return gathering, []
    return gathering, [Send(event.hello.agent_id, NewRound(state.generation))]


def _gathering_left(state: Gathering, event: AgentLeft, now_s: float) -> Step[Gathering | Running]:
    # A standby whose child is ready may become the node, and may be all that the round waits for.
    registry = state.registry.without_agent(event.agent_id)
    after, actions = _try_begin(replace(state, registry=registry))
    return after, [*actions, *_relaunch(after)]


def _gathering_ready(
    state: Gathering, event: AgentReady, now_s: float
) -> Step[Gathering | Running]:
    return _try_begin(_ready(state, event, now_s)[0])


def _gathering_fault(
    state: Gathering, event: FailureReported, now_s: float
) -> Step[Gathering | Failed]:
    if event.message.generation != state.generation:
        return state, []
    if state.registry.node_of(event.agent_id) is None:
        return _standby_fault(state, event, now_s)
    return _decide(state, (event.message.failure,), now_s)


def _standby_fault(state: R, event: FailureReported, now_s: float) -> Step[R]:
    """Forget the child of a standby: it harms no node, and cannot begin before the next round."""
    return replace(state, registry=state.registry.with_child(event.agent_id, None)), []


def _gathering_expired(
    state: Gathering, event: DeadlinePassed, now_s: float
) -> Step[Gathering | Running | Failed]:
    registry = state.registry
    after, actions = _try_begin(state, may_be_small=state.world is not None)
    if isinstance(after, Running):
        return after, actions
    stops = _stop_children(registry, state.generation)
    leaves_s = now_s + registry.spec.settings.stay_s
    missing = _named(registry.missing())
    if state.failures:
        why = f" The last attempt: {state.problem}" if state.problem else ""
        recovery = registry.spec.settings.recovery
        note = (
            f"{state.reason}; but {missing or 'not all children'} did not come back within "
            f"Recovery(wait_s={recovery.wait_s:g}), and min_nodes={recovery.min_nodes}. See the "
            f"Spark UI for free slots and executors.{why}"
        )
        return Failed(registry, state.failures, None, {}, state.world, note, leaves_s), stops
    total = len(registry.spec.nodes)
    timeout_s = registry.spec.settings.start_timeout_s
    problem = ReservationTimeoutError(
        f"{total - len(registry.missing())} of {total} nodes came up within {timeout_s:g} s; "
        f"missing: {missing or 'none, but not all children started'}. Their Spark tasks are "
        "waiting for a free slot or cannot reach the driver; see the Spark UI, free slots or ask "
        "for fewer nodes, or raise Startup(timeout_s=…)"
    )
    return Failed(registry, (), problem, deadline_s=leaves_s), stops


def _named(nodes: Sequence[NodeSpec]) -> str:
    return listed([node.name for node in nodes])


def _launch_failed(state: Gathering, event: LaunchFailed, now_s: float) -> Step[Gathering | Failed]:
    """Fail before the first world; later, bring the missing nodes back by another job."""
    if _has_begun(state):
        return replace(state, problem=event.problem), _relaunch(state)
    leaves_s = now_s + state.registry.spec.settings.stay_s
    failed = Failed(state.registry, (), event.problem, deadline_s=leaves_s)
    return failed, _stop_children(state.registry, state.generation)


def _running_entered(state: Running, event: ChildEntered, now_s: float) -> Step[Running]:
    node_id = state.registry.node_of(event.agent_id)
    if node_id is None or event.message.generation != state.world.generation:
        return state, []
    return replace(state, in_map_fun=state.in_map_fun | {node_id}), []


def _running_returned(
    state: Running, event: ResultReported, now_s: float
) -> Step[Running | Finished]:
    node_id = state.registry.node_of(event.agent_id)
    if node_id is None or event.message.generation != state.world.generation:
        return state, []
    returned = {**state.returned, node_id: event.message}
    finishing = state.world.finishing
    exits: list[Action] = []
    if event.message.has_exited:
        node = state.world.member(node_id).node.name
        exits.append(
            Warn(
                f"map_fun of {node} called sys.exit(0) instead of returning. This counts as "
                "success, and the result is None. If the training was not done there, raise an "
                "exception; if it was, return from map_fun"
            )
        )
    if not finishing <= returned.keys():
        return replace(state, returned=returned), exits
    # Nodes that do not finish the job (ps, evaluator) do not return by themselves.
    helpers = [
        Send(agent.agent_id, StopChild(agent.child.generation if agent.child else 0))
        for node, agent in state.registry.agents.items()
        if node not in returned
    ]
    report = Report(f"all {len(finishing)} training nodes have returned")
    # TensorBoard runs beside the first node, and is looked at when the training is over.
    spec = state.registry.spec
    stay_s = spec.settings.stay_s if spec.tensorboard is None else math.inf
    finished = Finished(state.registry, state.world, returned, now_s + stay_s)
    return finished, [*exits, report, *helpers]


def _running_fault(state: Running, event: FailureReported, now_s: float) -> Step[Running | Failing]:
    if event.message.generation != state.world.generation:
        return state, []
    if state.registry.node_of(event.agent_id) is None:
        return _standby_fault(state, event, now_s)
    return _fails(state, event.message.failure, now_s)


def _running_left(state: Running, event: AgentLeft, now_s: float) -> Step[Running | Failing]:
    failure = _lost(state, event)
    left = replace(state, registry=state.registry.without_agent(event.agent_id))
    after, actions = _fails(left, failure, now_s) if failure else (left, [])
    if isinstance(after, Running):  # a standby may be the node now
        actions = [*actions, *_detach(after.registry)]
    return after, actions


def _running_blamed(state: Running, event: NodesBlamed, now_s: float) -> Step[Running | Failing]:
    if event.generation != state.world.generation:
        return state, []
    return _failing(state, event.failures, now_s), []


def _joined(state: U, event: AgentJoined, now_s: float) -> Step[U]:
    """Register the agent; detach it now if feeding needs its slot, not when its world begins."""
    if _is_too_many(state, event):
        return _refused(state, event)
    registered = replace(state, registry=state.registry.with_agent(Agent(event.hello)))
    return registered, _detach(registered.registry, event.hello.agent_id)


def _ready(state: R, event: AgentReady, now_s: float) -> Step[R]:
    return replace(state, registry=state.registry.with_child(event.agent_id, event.child)), []


def _fails(state: Running, failure: Failure, now_s: float) -> Step[Running | Failing]:
    return _continues_without(state, failure) or (_failing(state, (failure,), now_s), [])


def _failing(state: Running, failures: tuple[Failure, ...], now_s: float) -> Failing:
    failing = Failing(state.registry, state.world, state.returned, failures, math.inf)
    return replace(failing, deadline_s=_settled_s(failing, now_s))


def _settled_s(state: Failing, now_s: float) -> float:
    """Return until when to wait for other failures."""
    settings = state.registry.spec.settings
    cause = min(state.failures, key=lambda failure: failure.order)
    # A SIGKILL explains a restart: no failure of another node sends one.
    if cause.signal_number == signal.SIGKILL and settings.can_restart:
        return now_s
    nodes = {member.node.node_id for member in state.world.members}
    suspects = nodes - {failure.node_id for failure in state.failures} - state.returned.keys()
    if not (cause.is_consequence and suspects):
        return now_s + settings.settle_s
    # A library may notice the loss of a peer before the peer's agent or the host watch does. If
    # another node may be the cause, wait as long as the host watch takes.
    return now_s + settings.recovery.host_timeout_s + settings.settle_s


def _running_checkpoint(
    state: Running, event: CheckpointCompleted, now_s: float
) -> Step[Running | Gathering]:
    """Note it; nodes that came meanwhile take part from here on."""
    if event.ref.generation != state.world.generation:
        return state, []
    registry = replace(state.registry, checkpoint=event.ref)
    members = {member.node.node_id for member in state.world.members}
    newcomers = sorted(registry.agents.keys() - members)
    # A node that has returned would have to train again.
    if state.returned:
        return replace(state, registry=registry), []
    if not newcomers:
        return replace(state, registry=registry), _relaunch(replace(state, registry=registry))
    names = listed([registry.spec.nodes[node_id].name for node_id in newcomers])
    reason = f"{names} came back: restarting at step {event.ref.step}"
    gathering = Gathering(
        registry,
        state.world.generation + 1,
        now_s + registry.spec.settings.recovery.wait_s,
        reason=reason,
        world=state.world,
        is_growth=True,
    )
    return gathering, [Report(reason), *_to_all(registry, NewRound(gathering.generation))]


def _failing_fault(state: Failing, event: FailureReported, now_s: float) -> Step[Failing]:
    if event.message.generation != state.world.generation:
        return state, []
    if state.registry.node_of(event.agent_id) is None:
        return _standby_fault(state, event, now_s)
    return _failed_as_well(state, event.message.failure, now_s), []


def _failing_left(state: Failing, event: AgentLeft, now_s: float) -> Step[Failing]:
    failure = _lost(state, event)
    after = replace(state, registry=state.registry.without_agent(event.agent_id))
    if failure is None or any(known.node_id == failure.node_id for known in state.failures):
        return after, []
    return _failed_as_well(after, failure, now_s), []


def _failed_as_well(state: Failing, failure: Failure, now_s: float) -> Failing:
    if not state.registry.spec.nodes[failure.node_id].role.is_needed:
        return state
    return _shorten_deadline(replace(state, failures=(*state.failures, failure)), now_s)


def _shorten_deadline(state: Failing, now_s: float) -> Failing:
    return replace(state, deadline_s=min(state.deadline_s, _settled_s(state, now_s)))


def _failing_returned(state: Failing, event: ResultReported, now_s: float) -> Step[Failing]:
    node_id = state.registry.node_of(event.agent_id)
    if node_id is None or event.message.generation != state.world.generation:
        return state, []
    returned = {**state.returned, node_id: event.message}
    return _shorten_deadline(replace(state, returned=returned), now_s), []


def _failing_checkpoint(state: Failing, event: CheckpointCompleted, now_s: float) -> Step[Failing]:
    if event.ref.generation != state.world.generation:
        return state, []
    return replace(state, registry=replace(state.registry, checkpoint=event.ref)), []


def _failing_settled(
    state: Failing, event: DeadlinePassed, now_s: float
) -> Step[Gathering | Failed]:
    return _decide(state, state.failures, now_s)


def _decide(
    state: Gathering | Failing, failures: tuple[Failure, ...], now_s: float
) -> Step[Gathering | Failed]:
    """Fail, or begin another round with the nodes that are left, and bring back the others."""
    registry, world, settings = state.registry, state.world, state.registry.spec.settings
    history = registry.history
    generation = state.world.generation if isinstance(state, Failing) else state.generation
    decision = decide(failures, history, settings, now_s)
    cause = min(failures, key=lambda failure: failure.order)
    if isinstance(decision, Fail):
        returned = state.returned if isinstance(state, Failing) else {}
        end_s = now_s + settings.stay_s
        failed = Failed(registry, failures, None, returned, world, decision.reason, end_s)
        # Each agent gets this text for its feeders, so it has no lines of the log.
        return failed, _stop_children(registry, generation, replace(cause, log_tail=()).describe())
    if isinstance(decision, Retry):
        history = replace(history, port_retries=history.port_retries + 1)
        deadline_s = now_s + settings.start_timeout_s
        notice: Action = Report(decision.reason)
        failures = ()
    else:
        restarts_s = (*history.restarts_s, now_s)
        history = replace(history, restarts_s=restarts_s, cause=cause)
        deadline_s = now_s + settings.recovery.wait_s
        notice = Warn(decision.reason)
    gathering = Gathering(
        replace(registry, history=history),
        generation + 1,
        deadline_s,
        failures,
        decision.reason,
        world,
    )
    rounds = _to_all(registry, NewRound(generation + 1))
    return gathering, [notice, *rounds, *_relaunch(gathering)]


def _ending_joined(state: S, event: AgentJoined, now_s: float) -> Step[S]:
    """A late agent, such as a retried task's, has nothing to do here."""
    return state, [Send(event.hello.agent_id, Stop(0.0))]


def _without_agent(state: R, event: AgentLeft, now_s: float) -> Step[R]:
    after = replace(state, registry=state.registry.without_agent(event.agent_id))
    is_last = state.registry.has_agents and not after.registry.has_agents
    return after, [Release()] if is_last and math.isinf(state.deadline_s) else []


def _stop_agents(state: R, event: DeadlinePassed, now_s: float) -> Step[R]:
    """Stop all agents; each exits after its results of inference are read."""
    registry, after = state.registry, replace(state, deadline_s=math.inf)
    stop = Stop(registry.spec.settings.grace_s, is_patient=True)
    return after, _to_all(registry, stop) or [Release()]


def _stop(state: Any, event: StopRequested, now_s: float) -> Step[Stopping | Stopped]:
    registry = state.registry
    if not registry.has_agents:
        return Stopped(state), []
    stopping = Stopping(registry, state, now_s + event.timeout_s)
    return stopping, _to_all(registry, Stop(event.grace_s))


def _stopping_joined(state: Stopping, event: AgentJoined, now_s: float) -> Step[Stopping]:
    registry = state.registry.with_agent(Agent(event.hello))
    return replace(state, registry=registry), [Send(event.hello.agent_id, Stop(0.0))]


def _stopping_left(state: Stopping, event: AgentLeft, now_s: float) -> Step[Stopping | Stopped]:
    registry = state.registry.without_agent(event.agent_id)
    if registry.has_agents:
        return replace(state, registry=registry), []
    return Stopped(state.before), []


def _stopping_asked(state: Stopping, event: StopRequested, now_s: float) -> Step[Stopping]:
    deadline_s = now_s + event.timeout_s
    if deadline_s >= state.deadline_s:
        return state, []
    return replace(state, deadline_s=deadline_s), _to_all(state.registry, Stop(event.grace_s))


def _stopping_expired(state: Stopping, event: DeadlinePassed, now_s: float) -> Step[Stopped]:
    nodes = state.registry.spec.nodes
    return Stopped(state.before, tuple(nodes[n].name for n in state.registry.agents)), []


def _stop_children(registry: AgentRegistry, generation: int, reason: str = "") -> list[Action]:
    return _to_all(registry, StopChild(generation, reason))


def _lost(state: Running | Failing, event: AgentLeft) -> Failure | None:
    node_id = state.registry.node_of(event.agent_id)
    if node_id is None or not state.world.has(node_id):
        return None
    return node_failure(state, node_id, "lost", event.reason, event.wall_s)


# the return of lost nodes, and the task slots they take
#
#    detached    Begin ──▶ Detach ──▶ AgentDetached ──▶ ForgetTask
#
# Where the cluster's placement is detached, agents give their slots back: those of a world when it
# begins, later joiners as they join.


def _continues_without(state: Running, failure: Failure) -> Step[Running] | None:
    """Return the next state if the others continue; `None` if this failure affects all nodes."""
    node = state.registry.spec.nodes[failure.node_id]
    if node.role.is_needed:
        return None
    after = replace(
        state, in_map_fun=state.in_map_fun - {node.node_id}, left=state.left | {node.node_id}
    )
    return after, [Warn(f"the training continues without {node.name}: {failure.describe()}")]


def _relaunch(state: State) -> list[Action]:
    if not isinstance(state, (Gathering, Running)) or not _has_begun(state):
        return []
    left = state.left if isinstance(state, Running) else ()
    wanted = tuple(node for node in state.registry.wanted() if node.node_id not in left)
    return [Relaunch(wanted)] if wanted else []


def _has_begun(state: Gathering | Running) -> bool:
    """Whether nodes that are missing were there before, and are to come back."""
    # Until the first world the job of the launch itself still brings the missing nodes.
    is_first = isinstance(state, Gathering) and not state.failures and state.world is None
    return not is_first and state.registry.spec.settings.can_restart


def _is_too_many(state: Gathering | Running | Failing, event: AgentJoined) -> bool:
    """Whether an agent is to go at once: it would take a slot, and is not needed.

    Its node has an agent that is detached or belongs to another task. The latter happens where
    Spark kills an executor while its tasks end in order: Spark repeats some of them, and a relaunch
    brings the same nodes.
    """
    registry, node_id = state.registry, event.hello.node_id
    holder = registry.agents.get(node_id)
    if holder is None:
        return False
    return holder.is_detached or holder.hello.task != event.hello.task


def _refused(state: R, event: AgentJoined) -> Step[R]:
    """Stop a surplus agent in order, so that Spark does not repeat its task."""
    hello, nodes = event.hello, state.registry.spec.nodes
    task = [ForgetTask(nodes[hello.node_id])] if 0 <= hello.node_id < len(nodes) else []
    return state, [Send(hello.agent_id, Stop(0.0)), *task]


def _detach(registry: AgentRegistry, agent_id: str | None = None) -> list[Action]:
    """Make one agent or all give their slots back, if the placement is detached."""
    return [
        Send(agent.agent_id, Detach())
        for agent in registry.agents.values()
        if registry.spec.placement == "detached" and agent.holds_slot
        if agent_id in (None, agent.agent_id)
    ]


def _detached(state: R, event: AgentDetached, now_s: float) -> Step[R]:
    """Record that an agent's task ends, and stop its standbys: they would only hold a slot.

    They are not stopped earlier: when the first attempt of a task has ended, Spark ends the others.
    """
    node_id = state.registry.node_of(event.agent_id)
    if node_id is None:
        return state, []
    registry = state.registry.detached(event.agent_id)
    idle = [agent for agent in registry.standbys if agent.hello.node_id == node_id]
    ends = [Send(agent.agent_id, Stop(0.0)) for agent in idle]
    return replace(state, registry=registry), [ForgetTask(registry.spec.nodes[node_id]), *ends]


_UNDECIDED: dict[type, Callable[[Any, Any, float], Step[Any]]] = {
    **dict.fromkeys(
        (ChildEntered, ResultReported, NodesBlamed, CheckpointCompleted, LaunchFailed), stay
    ),
    AgentJoined: _joined,
    AgentDetached: _detached,
    AgentReady: _ready,
    StopRequested: _stop,
}
"""The default handlers in each state before the end has been decided."""

_DECIDED: dict[type, Callable[[Any, Any, float], Step[Any]]] = {
    **dict.fromkeys((*_UNDECIDED, FailureReported), stay),
    AgentJoined: _ending_joined,
    AgentLeft: _without_agent,
    DeadlinePassed: _stop_agents,
    StopRequested: _stop,
}
"""The handlers in the states after the end has been decided."""

TRANSITIONS: dict[tuple[type, type], Callable[[Any, Any, float], Step[State]]] = {
    **{(s, e): f for s in (Gathering, Running, Failing) for e, f in _UNDECIDED.items()},
    (Gathering, AgentJoined): _gathering_joined,
    (Gathering, AgentLeft): _gathering_left,
    (Gathering, AgentReady): _gathering_ready,
    (Gathering, FailureReported): _gathering_fault,
    (Gathering, DeadlinePassed): _gathering_expired,
    (Gathering, LaunchFailed): _launch_failed,
    (Running, AgentLeft): _running_left,
    (Running, ChildEntered): _running_entered,
    (Running, ResultReported): _running_returned,
    (Running, FailureReported): _running_fault,
    (Running, NodesBlamed): _running_blamed,
    (Running, CheckpointCompleted): _running_checkpoint,
    (Failing, AgentLeft): _failing_left,
    (Failing, ResultReported): _failing_returned,
    (Failing, FailureReported): _failing_fault,
    (Failing, CheckpointCompleted): _failing_checkpoint,
    (Failing, DeadlinePassed): _failing_settled,
    **{(s, e): f for s in (Finished, Failed, Stopping) for e, f in _DECIDED.items()},
    (Stopping, AgentJoined): _stopping_joined,
    (Stopping, AgentLeft): _stopping_left,
    (Stopping, DeadlinePassed): _stopping_expired,
    (Stopping, StopRequested): _stopping_asked,
    **{(Stopped, e): stay for e in _DECIDED if e is not DeadlinePassed},
    (Stopped, AgentJoined): _ending_joined,
}
"""Every legal pair of state and event; `stay`: the event is expected and means nothing."""
