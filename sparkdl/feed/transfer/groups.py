"""Which nodes a feeder talks to where there are many: one group of them at a time.

Runs in: feeder

Eight nodes at most make one group, and every feeder brings rows to all of them. Of more nodes a
feeder has streams to one group only, and goes on to another that has fewer rows. What it has to
know beyond its group it asks agents, each feeder others, so that nobody is asked by all:

- the first node of a group plans for the group, and knows how many rows its nodes have;
- the keeper of a partition, which its number decides, knows where attempts have brought rows of it.
  A later attempt asks those nodes what they have, and an earlier one may go nowhere else any more.

Groups come out level but for a few pieces; the driver has nodes pass on what is uneven at the
epoch's end.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from sparkdl.core.row_ranges import Range
from sparkdl.feed.transfer.messages import (
    BeginRequest,
    FeederError,
    FeedSpec,
    LevelRequest,
    PutHeader,
    Question,
    Target,
    VisitRequest,
    flight_reason,
)

MAX_STREAMS = 8
"""Nodes that a feeder has streams to at once."""
Group = tuple[Target, ...]


def grouped(targets: Sequence[Target]) -> tuple[Group, ...]:
    """Return as few groups of at most `MAX_STREAMS` nodes as there can be, hosts together.

    Their sizes differ by one at most. All feeders find the same groups.
    """
    count = -(-len(targets) // MAX_STREAMS)
    if count <= 1:
        return (tuple(targets),)
    near = sorted(targets, key=lambda target: (target.host, target.node_id))
    borders = [len(near) * i // count for i in range(count + 1)]
    return tuple(tuple(near[a:b]) for a, b in pairwise(borders))


class Groups:
    """The groups of one feeder, and what it asks their agents. Not for several threads.

    Attributes:
        groups: all of them.
        closed: numbers of those that take no more rows.
        asked: a node that has not answered yet, if any.
        unreachable: a node that did not answer, if any.
    """

    def __init__(self, spec: FeedSpec, header: PutHeader) -> None:
        self.groups = grouped(spec.targets)
        self.closed: set[int] = set()
        self.asked: list[Target] = []
        self.unreachable: list[Target] = []
        self._spec = spec
        self._header = header
        self._keeper = spec.targets[header.partition % len(spec.targets)]
        self._turn = header.partition

    @property
    def are_closed(self) -> bool:
        """Whether no group takes rows."""
        return len(self.closed) == len(self.groups)

    def first(self, is_here: Callable[[str], bool] | None = None) -> int:
        """Return where to begin: with nodes of this host, or else where few others begin.

        Args:
            is_here: whether an address is one of this host's.
        """
        if len(self.groups) == 1:
            return 0
        hosts = {target.host for target in self._spec.targets}
        here = set(filter(is_here or _is_here, hosts))
        near = [n for n, group in enumerate(self.groups) if any(t.host in here for t in group)]
        numbers = near or range(len(self.groups))
        return numbers[self._header.partition % len(numbers)]

    def lower(self, now: int, slack: float) -> int:
        """Return another group if its nodes have fewer rows by more than `slack`, or else `now`.

        Each call looks at one other group, in turn, so that all of them are looked at.
        """
        others = [n for n in self._in_turn() if n != now and n not in self.closed]
        if not others:
            return now
        if now in self.closed:
            return others[0]
        return others[0] if self._level(others[0]) + slack < self._level(now) else now

    def visit(self, group: int) -> list[Target]:
        """Note that this attempt goes to a group; return other nodes that may have its rows.

        Raises:
            FeederError: if a later attempt has begun, or the keeper does not answer.
        """
        ids = tuple(target.node_id for target in self.groups[group])
        question = VisitRequest(*self._attempt, ids)
        visited = msgspec.json.decode(self._ask(self._keeper, question), type=list[int])
        before = {*visited, *self._spec.held.get(self._header.partition, ())} - set(ids)
        return [target for target in self._spec.targets if target.node_id in before]

    def begin(self, target: Target) -> list[Range]:
        """Begin at a node that gets no rows now; return the rows of the partition that it has.

        Raises:
            FeederError: if a later attempt has begun, or the node does not answer.
        """
        question = BeginRequest(*self._attempt)
        return msgspec.json.decode(self._ask(target, question), type=list[Range])

    @property
    def _attempt(self) -> tuple[str, int, int, str, int, int]:
        """The first fields of a question about this attempt."""
        it = self._header
        return it.feed, it.generation, it.epoch, it.run, it.partition, it.attempt

    def _in_turn(self) -> Iterator[int]:
        self._turn += 1
        count = len(self.groups)
        return ((self._turn + i) % count for i in range(count))

    def _level(self, group: int) -> float:
        targets, spec = self.groups[group], self._spec
        ids = tuple(target.node_id for target in targets)
        ahead = {n: spec.ahead[n] for n in ids if n in spec.ahead}
        question = LevelRequest(spec.feed, spec.generation, spec.epoch, ids, ahead)
        return msgspec.json.decode(self._ask(targets[0], question), type=float)

    def _ask(self, target: Target, question: Question) -> bytes:
        self.asked = [target]
        try:
            with self._spec.connect(target) as client:
                return ask(client, self._spec, question)
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, (flight.FlightUnavailableError, OSError)):
                self.unreachable = [target]
            raise FeederError(f"{target.name}: {flight_reason(error)}") from None
        finally:
            self.asked = []


def ask(client: flight.FlightClient, spec: FeedSpec, question: Question) -> bytes:
    """Return an agent's answer, as JSON."""
    action = flight.Action(type(question).__name__, msgspec.json.encode(question))
    (answer,) = client.do_action(action, spec.options())
    return bytes(answer.body.to_pybytes())


def _is_here(host: str) -> bool:
    """Whether an address is one of this machine's: only those can be bound."""
    with suppress(OSError):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
            return True
    return False
