"""What a roster knows at once is what a look at all its agents would find."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from sparkdl.control.messages import Hello, Offer
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.driver.lifecycle.roster import Agent, Roster

SPEC = ClusterSpec("c", plan_nodes(4))
AGENT_IDS = st.sampled_from("abcdefgh")
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("joins"), AGENT_IDS, st.integers(-1, 4)),
        st.tuples(st.just("leaves"), AGENT_IDS, st.just(0)),
        st.tuples(st.just("offers"), AGENT_IDS, st.integers(0, 2)),
        st.tuples(st.just("takes back"), AGENT_IDS, st.just(0)),
        st.tuples(st.just("detaches"), AGENT_IDS, st.just(0)),
    ),
    max_size=40,
)


@given(EVENTS)
def test_index_of_a_roster_is_what_a_scan_finds(events: list[tuple[str, str, int]]) -> None:
    roster = Roster(SPEC)
    for what, agent_id, number in events:
        there = {a.agent_id for a in (*roster.agents.values(), *roster.standbys)}
        if what == "joins" and agent_id not in there:
            hello = Hello(number, "", agent_id, "h", 1, "", "3", "task")
            roster = roster.seated(Agent(hello))
        elif what == "leaves":
            roster = roster.without(agent_id)
        elif what == "offers":
            roster = roster.offering(agent_id, Offer(number, 9000))
        elif what == "takes back":
            roster = roster.offering(agent_id, None)
        elif what == "detaches":
            roster = roster.detached(agent_id)
        agents = roster.agents.values()
        assert roster.agents.node_ids == {a.agent_id: n for n, a in roster.agents.items()}
        assert all(roster.node_of(a.agent_id) is None for a in roster.standbys)
        assert +roster.agents.offered == Counter(a.offer.generation for a in agents if a.offer)
        for generation in range(3):
            has_all = len([a for a in agents if a.address(generation)]) == len(SPEC.nodes)
            assert (roster.world(generation) is not None) == has_all
