"""Chooses which of two hosts to give up if only the driver reaches both. Pure.

Runs in: driver

Feeders report the nodes that they do not reach. More reports may follow within a moment, so the
decision waits for them. It then gives up hosts until no cut is left between two remaining ones,
first the host that

1. is cut off from most others: it is more likely to be the cause;
2. has expendable nodes alone;
3. has fewer nodes: a host that only feeds costs no generation;
4. does not have the first node;

so each order of the reports leads to the same host, and a cut between two hosts to one. This
generation's reports about hosts that were given up still count as evidence against others.
"""

from __future__ import annotations

import math
from dataclasses import replace

from sparkdl.core.failure import Failure
from sparkdl.core.listing import listed
from sparkdl.driver.lifecycle.replacement import sent_away
from sparkdl.driver.lifecycle.state import (
    Action,
    Cut,
    LeaveHost,
    LinkCut,
    Running,
    Step,
    Warn,
    node_failure,
)

_SETTLE_SHARE = 0.25
"""The share of `host_timeout_s` to wait for other feeders' reports. They may have begun to send
later, and look once a second."""


def noted(state: Running, event: LinkCut, now_s: float) -> Step[Running]:
    """Note a feeder's report, unless it concerns another generation or a node that has left."""
    roster = state.roster
    agent = roster.agents.get(event.node_id)
    if event.generation != state.world.generation or agent is None:
        return state, []
    if event.host in roster.left_hosts:  # Spark has started another executor there
        return state, [LeaveHost(event.host)]
    cut = Cut(agent.hello.host, event.host)
    # A report that comes again must not put off the decision.
    if cut in state.cuts or not state.world.has(event.node_id):
        return state, []
    deadline_s = now_s + _SETTLE_SHARE * roster.spec.settings.recovery.host_timeout_s
    name = roster.spec.nodes[event.node_id].name
    text = f"{name} on {cut.node_host} cannot be reached from {cut.host}: one of them is given up"
    cuts = {**state.cuts, cut: event.wall_s}
    after = replace(state, cuts=cuts, deadline_s=min(state.deadline_s, deadline_s))
    return after, [Warn(text)]


def decided(state: Running) -> tuple[Running, tuple[Failure, ...], list[Action]]:
    """Return the state without the hosts that are given up, and the failures of their nodes.

    Their agents are stopped, and stay in the roster until they have left, so that no second agent
    trains for the same node.
    """
    hosts, last_s = _given_up(state), max(state.cuts.values(), default=0.0)
    roster = replace(state.roster, left_hosts=state.roster.left_hosts | set(hosts))
    failures = tuple(
        node_failure(state, m.node.node_id, "unreachable", _finding(state, m.host), last_s)
        for m in state.world.members
        if m.host in hosts
    )
    actions: list[Action] = []
    for host in hosts:
        text = f"{host} {_finding(state, host)}: nothing more is started there"
        actions += [Warn(text), LeaveHost(host)]
    for agent in (*roster.agents.values(), *roster.standbys):
        if agent.hello.host in hosts:
            actions += sent_away(roster, agent.hello)
    return replace(state, roster=roster, deadline_s=math.inf), failures, actions


def _given_up(state: Running) -> list[str]:
    chosen: list[str] = []
    while True:
        left = state.roster.left_hosts | set(chosen)
        between = {host for cut in state.cuts if not cut.hosts & left for host in cut.hosts}
        if not between:
            return chosen
        chosen.append(min(between, key=lambda host: _cost(state, host)))


def _cost(state: Running, host: str) -> tuple[object, ...]:
    members = [member for member in state.world.members if member.host == host]
    is_first_here = state.world.members[0] in members
    is_needed = not all(member.role.is_expendable for member in members)
    cut_off = {cut.hosts - {host} for cut in state.cuts if host in cut.hosts}
    # The name last, so that every order of the reports leads to the same choice.
    return -len(cut_off), is_needed, len(members), is_first_here, host


def _finding(state: Running, host: str) -> str:
    by = sorted(cut.host for cut in state.cuts if cut.node_host == host)
    to = sorted(cut.node_host for cut in state.cuts if cut.host == host)
    what = f"cannot be reached from {listed(by)}" if by else f"does not reach {listed(to)}"
    return f"{what}, though the driver reaches both"
