"""Messages come back as they were; whatever else arrives is a `ProtocolError`, never another."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from sparkdl.control import messages as msg
from sparkdl.core.errors import ProtocolError
from tests.control.strategies import messages

FROM_AGENT, TO_AGENT = messages(msg.FromAgent), messages(msg.ToAgent)


@given(st.one_of(*FROM_AGENT.values()))
def test_what_an_agent_says_arrives_as_it_was_and_is_no_command(message: msg.FromAgent) -> None:
    text = msg.encode(message)
    assert msg.decode_from_agent(text) == msg.decode_from_agent(text.encode()) == message
    with pytest.raises(ProtocolError, match="the coordinator sent"):
        msg.decode_to_agent(text)


@given(st.one_of(*TO_AGENT.values()))
def test_what_the_coordinator_says_arrives_as_it_was_and_no_agent_can(message: msg.ToAgent) -> None:
    text = msg.encode(message)
    assert msg.decode_to_agent(text) == message
    with pytest.raises(ProtocolError, match="an agent sent"):
        msg.decode_from_agent(text)


@pytest.mark.parametrize("decode", [msg.decode_from_agent, msg.decode_to_agent])
@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"[]", b"null", b"\xff", b'{"type":"Hello"}', b'{"type":"Stop"}',
        b'{"type":"Exec","code":"x"}',
        b'{"type":"ChildReady","generation":0,"port":"80"}',
        b'{"type":"ChildReady","generation":0,"port":80.5}',
        b'{"type":"ChildReady","generation":0,"port":80,"extra":1}',
        b'{"type":"ChildReady","generation":0,"port":80} {}',
        b'{"type":"NewRound","generation":null}',
        b'{"type":"ChildFailed","generation":0,"failure":{"node":"a","kind":"?","message":"","time_s":0}}',
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"type":"ChildFailed","generation":0,"failure":{"x":' + b"[" * 100_000,
        b'{"type":"Begin","world":{"x":' + b'{"a":' * 100_000,
    ],
    ids=lambda data: data[:40].decode(errors="replace"),
)  # fmt: skip
def test_almost_messages_are_protocol_errors(decode: Any, data: bytes) -> None:
    with pytest.raises(ProtocolError, match="an invalid message"):
        decode(data)
