"""Collectives on tensors of PyTorch, in process groups of their own.

Runs in: child

Before each operation the members exchange 64 bytes that say what they are about to do. So a
mismatch is an error that says what each of them called, and those that have joined add zeros.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakMethod

from sparkdl.collectives.group import Op, even_splits, shares
from sparkdl.collectives.transport import Transport, bytes_of, dtypes, reduced, row_nbytes, scale_
from sparkdl.core import trace
from sparkdl.core.errors import CollectiveError, ConfigError, MismatchError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store


P = ParamSpec("P")
T = TypeVar("T")


class Kind(IntEnum):
    """What a member is about to do."""

    JOIN = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    BROADCAST = 3
    ALL_TO_ALL = 4
    REDUCE_SCATTER = 5
    BARRIER = 6
    STEP = 7


@dataclass(frozen=True)
class Call:
    """One operation as a member is about to do it.

    Attributes:
        what: all that must be the same on all members, in words.
        numel: numbers to reduce, of which those that have joined give as many zeros.
        dtype: of these, an index into `dtypes()`.
        extra: what may differ: rows to gather; for `JOIN`, how many operations it has stood in for.
        on_device: whether the tensors are a GPU's.
        is_sum: whether zeros of those that have joined do no harm.
        since_ns: when the member joined, by its own clock.
    """

    kind: Kind
    what: str
    numel: int = 0
    dtype: int = 0
    extra: int = 0
    on_device: bool = False
    is_sum: bool = True
    since_ns: int = 0

    def announcement(self) -> Announcement:
        """Return what the other members are sent of it."""
        digest = hashlib.blake2b(self.what.encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little", signed=True)
        rest = (self.extra, self.on_device, self.is_sum, self.since_ns)
        return Announcement(self.kind, number, self.numel, self.dtype, *rest)


class Announcement(NamedTuple):
    """A `Call` as whole numbers of 64 bits; `digest` stands for the words."""

    kind: int
    digest: int
    numel: int
    dtype: int
    extra: int
    on_device: int
    is_sum: int
    since_ns: int


def objection(calls: Sequence[Announcement]) -> str | None:
    """Return why members cannot do together what they have announced, by rank, or `None`."""
    active = [call for call in calls if call.kind != Kind.JOIN]
    if len({(call.kind, call.digest, call.numel, call.dtype) for call in active}) > 1:
        return "all must call the same, in the same order, with the same shapes and dtypes"
    if not active or len(active) == len(calls):
        return None
    if active[0].kind in (Kind.ALL_REDUCE, Kind.STEP) and all(call.is_sum for call in active):
        return None
    return "only sums and averages can be reduced while a member has joined"


def last_to_join(calls: Sequence[Announcement]) -> int:
    """Return the rank of the member that joined last; all members compute the same one.

    It has stood in for the fewest operations; among several, it is the last by the clocks.
    """
    return max(range(len(calls)), key=lambda rank: (-calls[rank].extra, calls[rank].since_ns, rank))


_WORDS = struct.Struct(f"<{len(Announcement._fields)}q")


def _traced(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have an operation be in the timeline: its name, the bytes of its tensor, and what it is."""

    def decorate(operate: Callable[P, T]) -> Callable[P, T]:
        @wraps(operate)
        def call(*args: P.args, **options: P.kwargs) -> T:
            if not trace.is_on():
                return operate(*args, **options)
            given: Any = (*args, *options.values())
            what = "".join(each for each in given if isinstance(each, str)).strip()
            nbytes = sum(each.nbytes for each in given if hasattr(each, "nbytes"))
            with trace.span("collective", name, None, what=what, nbytes=nbytes):
                return operate(*args, **options)

        return call

    return decorate


class TensorGroup:
    """Members of one process set, of which each call blocks; see `Group` for what they share.

    Args:
        rank: of this member, within the group.
        size: of the group.
        store: reaches the members, and no other group.
        host: this member's own address.
        key: a secret of the members.
        timeout_s: of each operation.
    """

    def __init__(
        self, rank: int, size: int, store: Store, host: str, key: bytes, timeout_s: float
    ) -> None:
        self.rank = rank
        self.size = size
        self._wire = Transport(rank, size, store, host, key, timeout_s)
        self._steps: list[WeakMethod[Callable[[], None]]] = []

    @_traced("all_reduce")
    def all_reduce_(
        self,
        flat: torch.Tensor,
        op: Op,
        what: str = "",
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> torch.Tensor:
        """Reduce a contiguous tensor in place, and return it.

        Args:
            what: for the comparison with the other members: names and shapes.
            prescale, postscale: factors before and after the reduction.

        Raises:
            CollectiveError: see `Group.all_reduce`.
        """
        numel, dtype = flat.numel(), dtypes().index(flat.dtype)
        what = f"all_reduce({op.value}, {what}, {flat.dtype}, x {prescale:g}, x {postscale:g})"
        is_sum = op in (Op.SUM, Op.AVERAGE)
        self.agree(Call(Kind.ALL_REDUCE, what, numel, dtype, 0, flat.is_cuda, is_sum))
        return self.reduce_now_(flat, op, prescale, postscale)

    @_traced("reduce")
    def reduce_now_(
        self, flat: torch.Tensor, op: Op, prescale: float = 1.0, postscale: float = 1.0
    ) -> torch.Tensor:
        """Do what `all_reduce_` does, when the members have agreed on it already."""
        scale_(flat, prescale)
        with self._wire.named_errors("all_reduce"):
            return self._wire.reduce_(flat, op, postscale, self._divisor(op))

    @_traced("all_gather")
    def all_gather(self, tensor: torch.Tensor, what: str = "") -> tuple[torch.Tensor, list[int]]:
        """Return the rows of all members by rank, and how many came from each."""
        import torch

        tensor = _rows(tensor)
        shape = list(tensor.shape[1:])
        calls = self.agree(
            _call(Kind.ALL_GATHER, f"{what}, {tensor.dtype} [rows, {shape}]", tensor, len(tensor))
        )
        counts = [call.extra for call in calls]
        out = torch.empty((sum(counts), *shape), dtype=tensor.dtype, device=tensor.device)
        size = row_nbytes(tensor)
        if out.numel():
            nbytes = [count * size for count in counts]
            with self._wire.named_errors("all_gather"):
                self._wire.gather(bytes_of(tensor), bytes_of(out), nbytes)
        return out, counts

    @_traced("broadcast")
    def broadcast_(self, tensor: torch.Tensor, root: int, what: str = "") -> torch.Tensor:
        """Fill a contiguous tensor with that of member `root`, and return it."""
        if not 0 <= root < self.size:
            raise ConfigError(f"root={root}: the group has the ranks 0 to {self.size - 1}")
        what = f"{what}, {tensor.dtype} {list(tensor.shape)}, from rank {root}"
        self.agree(_call(Kind.BROADCAST, what, tensor))
        if tensor.numel():
            with self._wire.named_errors("broadcast"):
                self._wire.broadcast(bytes_of(tensor), root)
        return tensor

    @_traced("all_to_all")
    def all_to_all(
        self, tensor: torch.Tensor, splits: Sequence[int] | None = None, what: str = ""
    ) -> tuple[torch.Tensor, list[int]]:
        """Return the rows sent to this member by rank, and how many came from each."""
        import torch

        tensor = _rows(tensor)
        sent = even_splits(len(tensor), self.size, splits)
        shape = list(tensor.shape[1:])
        self.agree(_call(Kind.ALL_TO_ALL, f"{what}, {tensor.dtype} [rows, {shape}]", tensor))
        all_sent = torch.empty(self.size * self.size, dtype=torch.int64)
        with self._wire.named_errors("all_to_all"):
            self._wire.gather_even(torch.tensor(sent, dtype=torch.int64), all_sent)
        got = all_sent.view(self.size, self.size)[:, self.rank].tolist()
        out = torch.empty((sum(got), *shape), dtype=tensor.dtype, device=tensor.device)
        with self._wire.named_errors("all_to_all"):
            self._wire.exchange(tensor, out, sent, got)
        return out, got

    @_traced("reduce_scatter")
    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: Op,
        what: str = "",
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> torch.Tensor:
        """Return this member's share of the rows, reduced; the first members get one more."""
        tensor = _rows(tensor)
        what = f"{what}, {op.value}, {tensor.dtype} {list(tensor.shape)}"
        self.agree(_call(Kind.REDUCE_SCATTER, what, tensor))
        sent = shares(len(tensor), self.size)
        mine = sent[self.rank]
        parts = tensor.new_empty((self.size, mine, *tensor.shape[1:]))
        with self._wire.named_errors("reduce_scatter"):
            self._wire.exchange(tensor, parts, sent, [mine] * self.size)
        scale_(parts, prescale)
        out = reduced(parts, op)
        return scale_(out, postscale, self._divisor(op))

    def _divisor(self, op: Op) -> int:
        return self.size if op is Op.AVERAGE else 1

    def barrier(self) -> None:
        """Wait until all members have called this."""
        self.agree(Call(Kind.BARRIER, ""))

    def register_step(self, join_step: WeakMethod[Callable[[], None]]) -> int:
        """Return the number of an operation of several reductions, for `step`.

        Args:
            join_step: a method that takes part in the reductions for a member that has joined;
                called after the members have agreed on the step.
        """
        self._steps.append(join_step)
        return len(self._steps) - 1

    def step(self, number: int, what: str, is_sum: bool = True) -> None:
        """Agree on the reductions that belong to a registered step; `reduce_now_` does them.

        Args:
            is_sum: whether zeros of a member that has joined do no harm.
        """
        self.agree(Call(Kind.STEP, f"step {number}: {what}", extra=number, is_sum=is_sum))

    def join(self) -> int:
        """See `Group.join`."""
        stood_in, since_ns = 0, time.time_ns()
        while True:
            calls = self.agree(Call(Kind.JOIN, "join()", extra=stood_in, since_ns=since_ns))
            active = [call for call in calls if call.kind != Kind.JOIN]
            if not active:
                return last_to_join(calls)
            stood_in += 1
            if objection(calls) is None:
                self._join_in(active[0])

    def _join_in(self, call: Announcement) -> None:
        import torch

        if call.kind == Kind.STEP:
            join_step = self._steps[call.extra]()
            if join_step is None:
                raise CollectiveError("the others step an optimizer that is no longer here")
            join_step()
        else:
            device, dtype = "cuda" if call.on_device else "cpu", dtypes()[call.dtype]
            self.reduce_now_(torch.zeros(call.numel, dtype=dtype, device=device), Op.SUM)

    def agree(self, call: Call) -> list[Announcement]:
        """Compare with what the other members are about to do; return it, by rank.

        Raises:
            MismatchError: on all members but those that have joined, if it cannot be done; it
                says what each called.
        """
        announcement = call.announcement()
        mine = _WORDS.pack(*announcement)
        what = call.kind.name.lower()
        with self._wire.named_errors(what), trace.span("collective", "wait for members", call=what):
            everyone = self._wire.announce(mine)
        if everyone.count(mine) == self.size:
            return [announcement] * self.size
        calls = [Announcement(*_WORDS.unpack(each)) for each in everyone]
        if (why := objection(calls)) is not None:
            self._refuse(call, why)
        return calls

    def _refuse(self, call: Call, why: str) -> None:
        import torch

        mine = torch.zeros(256, dtype=torch.uint8)
        text = f"{call.kind.name.lower()} {call.what}".encode()[:256]
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        all_texts = torch.empty(256 * self.size, dtype=torch.uint8)
        with self._wire.named_errors(call.kind.name.lower()):
            self._wire.gather_even(mine, all_texts)
        lines = [
            f"  rank {rank}: {bytes(row.tolist()).rstrip(bytes(1)).decode(errors='replace')}"
            for rank, row in enumerate(all_texts.view(self.size, 256))
        ]
        if call.kind is not Kind.JOIN:  # one that has joined did nothing wrong
            raise MismatchError("\n".join([f"the members called different things; {why}:", *lines]))

    def close(self) -> None:
        """Let the connections go."""
        self._wire.close()


def _call(kind: Kind, what: str, tensor: torch.Tensor, extra: int = 0) -> Call:
    return Call(kind, what, extra=extra, on_device=tensor.is_cuda)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(1) if tensor.dim() == 0 else tensor.contiguous()
