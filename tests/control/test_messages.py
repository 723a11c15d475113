"""Messages come back as they were; whatever else arrives is a `ProtocolError`, never another."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.control.messages import (
    MAX_MESSAGE_NBYTES,
    AllGathered,
    AskClock,
    Begin,
    BoardStarted,
    CheckpointCommit,
    CheckpointDone,
    CheckpointPart,
    ChildFailed,
    ChildReturned,
    ChildRunning,
    ClockTold,
    Detach,
    Detached,
    EpochEnd,
    FeedBegin,
    FeedCount,
    FeedCovered,
    FeedCut,
    FeedEnd,
    FeedHold,
    FeedProgress,
    FetchLog,
    FetchProfile,
    FetchStacks,
    FromAgent,
    Gather,
    Granted,
    Hello,
    LastLines,
    LogLines,
    LogTail,
    LoneNodes,
    NewRound,
    NodeActive,
    NodeLoad,
    Offer,
    PassOn,
    Profiled,
    ReadShare,
    Refused,
    RowsTo,
    Stacks,
    Stop,
    StopChild,
    ToAgent,
    Traced,
    TrainsAlone,
    decode_from_agent,
    decode_to_agent,
    encode,
    encode_for_agents,
)
from sparkdl.control.rows import DataFile, FileRange, Share, Storage
from sparkdl.core.errors import ProtocolError
from sparkdl.core.failure import Failure, FailureKind
from sparkdl.core.spec import plan_nodes
from sparkdl.core.trace import Span
from sparkdl.core.world import Address, CheckpointRef, Resume, World, build_world

Decode = Callable[[bytes | str], Any]

INT = st.integers(-(2**63), 2**64 - 1)
TEXT = st.text(max_size=20)
LINES = st.lists(TEXT, max_size=4).map(tuple)
TIME = st.floats(allow_nan=False, allow_infinity=False)
FAILURES = st.builds(
    Failure, TEXT, st.sampled_from(get_args(FailureKind)),
    TEXT, TIME, INT, INT, TEXT, INT, st.none() | INT, st.none() | INT, TEXT, TEXT, LINES, INT,
)  # fmt: skip

PART_ROWS = st.dictionaries(INT, st.lists(st.tuples(INT, INT), max_size=3).map(tuple), max_size=2)
EPOCH_ROWS = st.dictionaries(INT, PART_ROWS, max_size=2)
SPAN = st.builds(
    Span, TEXT, TEXT, INT | TEXT, INT, INT, st.dictionaries(TEXT, INT | TEXT, max_size=2)
)
RESUMES = st.builds(Resume, INT, st.none() | st.builds(CheckpointRef, TEXT, INT, INT))
SHARES = st.builds(
    Share,
    st.builds(Storage, TEXT, st.dictionaries(TEXT, TEXT | INT, max_size=2)),
    st.binary(max_size=20),
    LINES,
    st.lists(
        st.builds(DataFile, TEXT, INT, st.lists(st.none() | TEXT, max_size=2).map(tuple)),
        max_size=3,
    ).map(tuple),
    st.lists(st.builds(FileRange, INT, INT, INT, INT), max_size=3).map(tuple),
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    nodes = plan_nodes(
        draw(st.integers(3, 6)), draw(st.integers(0, 1)), "chief", draw(st.booleans())
    )
    return build_world(draw(INT), {n: Address(draw(TEXT), draw(INT), draw(TEXT)) for n in nodes})


FROM_AGENT: dict[type, st.SearchStrategy[Any]] = {
    Hello: st.builds(Hello, INT, INT, TEXT, TEXT, INT, TEXT, TEXT, TEXT),
    Detached: st.just(Detached()),
    Offer: st.builds(Offer, INT, INT),
    ChildRunning: st.builds(ChildRunning, INT, INT),
    ChildReturned: st.builds(ChildReturned, INT, st.binary(max_size=40), TEXT),
    ChildFailed: st.builds(ChildFailed, INT, FAILURES),
    FeedProgress: st.lists(
        st.builds(
            FeedCount,
            TEXT,
            INT,
            INT,
            INT,
            INT,
            INT,
            INT,
            st.booleans(),
            INT,
            INT,
            INT,
            INT,
            INT,
            st.booleans(),
            INT,
            INT,
            INT,
            TEXT,
            INT,
        ),
        max_size=3,
    ).map(lambda counts: FeedProgress(tuple(counts))),
    LastLines: st.builds(LastLines, INT, LINES),
    Refused: st.builds(Refused, TEXT, TEXT),
    LogLines: st.builds(LogLines, LINES),
    LogTail: st.builds(LogTail, INT, INT, LINES),
    Stacks: st.builds(Stacks, INT, TEXT),
    Profiled: st.builds(Profiled, INT, st.dictionaries(TEXT, INT, max_size=3), TEXT, TEXT),
    NodeActive: st.builds(
        NodeActive,
        *(INT, INT, st.dictionaries(TEXT, TIME, max_size=2), INT, INT),
        *(TIME, TIME, TIME),
    ),
    NodeLoad: st.builds(NodeLoad, TIME, INT, INT, INT, TIME, INT),
    Traced: st.builds(Traced, INT, st.tuples(SPAN), INT, st.dictionaries(INT, TEXT, max_size=2)),
    ClockTold: st.builds(ClockTold, INT, INT),
    BoardStarted: st.builds(BoardStarted, INT, INT, TEXT, st.booleans()),
    CheckpointPart: st.builds(
        CheckpointPart, INT, INT, st.dictionaries(TEXT, EPOCH_ROWS, max_size=2)
    ),
    CheckpointDone: st.builds(CheckpointDone, INT, INT, TEXT),
    Gather: st.builds(Gather, INT, INT, st.binary(max_size=40)),
    TrainsAlone: st.builds(TrainsAlone, INT, st.lists(TEXT).map(tuple), TEXT, INT),
}
TO_AGENT: dict[type, st.SearchStrategy[Any]] = {
    Begin: st.builds(Begin, worlds(), RESUMES),
    CheckpointCommit: st.builds(CheckpointCommit, INT, INT, TEXT),
    PassOn: st.builds(
        PassOn, TEXT, INT, TEXT, INT, st.lists(st.builds(RowsTo, TEXT, TEXT, INT)).map(tuple)
    ),
    LoneNodes: st.builds(LoneNodes, INT, INT, INT),
    AllGathered: st.builds(AllGathered, INT, INT, st.lists(st.binary(max_size=9)).map(tuple), TEXT),
    NewRound: st.builds(NewRound, INT),
    StopChild: st.builds(StopChild, INT),
    FeedBegin: st.builds(FeedBegin, TEXT, INT, INT, TEXT, st.just({1: ((0, 2),)}), INT),
    ReadShare: st.builds(ReadShare, TEXT, INT, SHARES, st.booleans()),
    FeedCut: st.builds(FeedCut, TEXT, INT),
    FeedHold: st.builds(FeedHold, TEXT, INT),
    FeedCovered: st.builds(FeedCovered, TEXT, INT),
    Granted: st.builds(Granted, TEXT, INT, INT),
    EpochEnd: st.builds(
        EpochEnd, TEXT, INT, st.dictionaries(st.integers(0, 9), INT, max_size=4), st.booleans()
    ),
    FeedEnd: st.builds(FeedEnd, LINES),
    FetchLog: st.builds(FetchLog, INT, INT),
    FetchStacks: st.builds(FetchStacks, INT),
    AskClock: st.builds(AskClock, INT),
    FetchProfile: st.builds(FetchProfile, INT, TIME, TEXT, TEXT),
    Stop: st.builds(Stop, TIME),
    Detach: st.just(Detach()),
}


def test_every_message_is_tried_here() -> None:
    assert set(FROM_AGENT) == set(get_args(FromAgent))
    assert set(TO_AGENT) == set(get_args(ToAgent))


@given(st.one_of(*FROM_AGENT.values()))
def test_what_an_agent_says_arrives_as_it_was(message: FromAgent) -> None:
    text = encode(message)
    assert decode_from_agent(text) == message
    assert decode_from_agent(text.encode()) == message


@given(st.one_of(*TO_AGENT.values()))
def test_what_the_coordinator_says_arrives_as_it_was(message: ToAgent) -> None:
    text = encode(message)
    assert decode_to_agent(text) == message
    assert decode_to_agent(encode_for_agents(message)) == message


@given(st.one_of(*FROM_AGENT.values()))
def test_the_coordinator_takes_no_agents_words_for_its_own(message: FromAgent) -> None:
    with pytest.raises(ProtocolError, match="the coordinator sent"):
        decode_to_agent(encode(message))


@given(st.one_of(*TO_AGENT.values()))
def test_an_agent_cannot_command(message: ToAgent) -> None:
    with pytest.raises(ProtocolError, match="an agent sent"):
        decode_from_agent(encode(message))


@pytest.mark.parametrize("decode", [decode_from_agent, decode_to_agent])
@given(st.binary() | st.text(st.characters()))
def test_noise_is_a_protocol_error_and_nothing_else(decode: Decode, data: bytes | str) -> None:
    with pytest.raises(ProtocolError, match="is no message"):
        decode(data)


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | INT | TIME | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({name for cls in (*FROM_AGENT, *TO_AGENT) for name in cls.__struct_fields__})  # type: ignore[attr-defined]


@pytest.mark.parametrize("decode", [decode_from_agent, decode_to_agent])
@given(
    st.sampled_from([cls.__name__ for cls in (*FROM_AGENT, *TO_AGENT)]),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
)
def test_messages_with_odd_fields_are_protocol_errors_if_they_are_not_messages(
    decode: Decode, name: str, fields: dict[str, Any]
) -> None:
    with suppress(ProtocolError):
        decode(msgspec.json.encode({"type": name, **fields}))


@pytest.mark.parametrize("decode", [decode_from_agent, decode_to_agent])
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
    assert len(encode(Begin(world))) < MAX_MESSAGE_NBYTES


def test_frame_that_inflates_to_more_than_a_message_may_have_is_refused() -> None:
    with pytest.raises(ProtocolError, match=f"more than {MAX_MESSAGE_NBYTES} bytes"):
        decode_to_agent(zlib.compress(bytes(MAX_MESSAGE_NBYTES + 1)))


def test_columns_of_different_lengths_are_no_world() -> None:
    world = build_world(0, {node: Address("h", 1, "") for node in plan_nodes(2)})
    begin = zlib.decompress(bytes(encode_for_agents(Begin(world))))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError):
        decode_to_agent(zlib.compress(begin.replace(b'"port":[1,1]', b'"port":[1]')))


def test_a_member_costs_the_frame_of_a_large_world_little_but_its_ports() -> None:
    where = {
        node: Address(
            host := f"10.0.{node.node_id >> 8}.{node.node_id & 255}", 40_000, f"x://{host}:1"
        )
        for node in plan_nodes(5000)
    }
    assert len(encode_for_agents(Begin(build_world(0, where)))) < 5 * len(where)
