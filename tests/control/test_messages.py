"""Messages come back as they were; whatever else arrives is a `ProtocolError`, never another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.control import messages as msg
from sparkdl.core.errors import ProtocolError
from sparkdl.core.spec import plan_nodes
from sparkdl.core.world import Address, build_world
from tests.control.strategies import INT, NUMBER, TEXT, messages

Decode = Callable[[bytes | str], Any]

FROM_AGENT, TO_AGENT = messages(msg.FromAgent), messages(msg.ToAgent)


@given(st.one_of(*FROM_AGENT.values()))
def test_what_an_agent_says_arrives_as_it_was(message: msg.FromAgent) -> None:
    text = msg.encode(message)
    assert msg.decode_from_agent(text) == message
    assert msg.decode_from_agent(text.encode()) == message


@given(st.one_of(*TO_AGENT.values()))
def test_what_the_coordinator_says_arrives_as_it_was(message: msg.ToAgent) -> None:
    text = msg.encode(message)
    assert msg.decode_to_agent(text) == message


@given(st.one_of(*FROM_AGENT.values()))
def test_the_coordinator_takes_no_agents_words_for_its_own(message: msg.FromAgent) -> None:
    with pytest.raises(ProtocolError, match="the coordinator sent"):
        msg.decode_to_agent(msg.encode(message))


@given(st.one_of(*TO_AGENT.values()))
def test_an_agent_cannot_command(message: msg.ToAgent) -> None:
    with pytest.raises(ProtocolError, match="an agent sent"):
        msg.decode_from_agent(msg.encode(message))


@pytest.mark.parametrize("decode", [msg.decode_from_agent, msg.decode_to_agent])
@given(st.binary() | st.text(st.characters()))
def test_noise_is_a_protocol_error_and_nothing_else(decode: Decode, data: bytes | str) -> None:
    with pytest.raises(ProtocolError, match="is no message"):
        decode(data)


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | INT | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({name for cls in (*FROM_AGENT, *TO_AGENT) for name in cls.__struct_fields__})  # type: ignore[attr-defined]


@pytest.mark.parametrize("decode", [msg.decode_from_agent, msg.decode_to_agent])
@given(
    st.sampled_from([cls.__name__ for cls in (*FROM_AGENT, *TO_AGENT)]),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
)
def test_messages_with_odd_fields_are_protocol_errors_if_they_are_not_messages(
    decode: Decode, name: str, fields: dict[str, Any]
) -> None:
    with suppress(ProtocolError):
        decode(msgspec.json.encode({"type": name, **fields}))


@pytest.mark.parametrize("decode", [msg.decode_from_agent, msg.decode_to_agent])
@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"[]", b"null", b"\xff", b'{"type":"Hello"}', b'{"type":"Stop"}',
        b'{"type":"Exec","code":"x"}',
        b'{"type":"Offer","generation":0,"port":"80"}',
        b'{"type":"Offer","generation":0,"port":80.5}',
        b'{"type":"Offer","generation":0,"port":80,"extra":1}',
        b'{"type":"Offer","generation":0,"port":80} {}',
        b'{"type":"NewRound","generation":null}',
        b'{"type":"ChildFailed","generation":0,"failure":{"node":"a","kind":"?","message":"","time_s":0}}',
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"type":"ChildFailed","generation":0,"failure":{"x":' + b"[" * 100_000,
        b'{"type":"Begin","world":{"x":' + b'{"a":' * 100_000,
    ],
    ids=lambda data: data[:40].decode(errors="replace"),
)  # fmt: skip
def test_almost_messages_are_protocol_errors(decode: Decode, data: bytes) -> None:
    with pytest.raises(ProtocolError, match="is no message"):
        decode(data)


def test_a_world_of_thousands_of_nodes_fits_into_a_message() -> None:
    nodes = plan_nodes(5000)
    where = Address(
        "ip-10-123-123-123.eu-central-1.compute.internal", 65535, "grpc+tcp://1.2.3.4:5"
    )
    world = build_world(0, dict.fromkeys(nodes, where))
    assert len(msg.encode(msg.Begin(world))) < msg.MAX_MESSAGE_NBYTES
