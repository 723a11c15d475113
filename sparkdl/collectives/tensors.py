"""Collectives on tensors of PyTorch, in process groups of their own.

Runs in: child

PyTorch's default process group stays the user's. Before each operation the members tell each other
in 64 bytes what they are about to do: so a mismatch is an error that says what each of them
called, and those that have joined take part with zeros.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from sparkdl.collectives.base import Op, even_splits, shares
from sparkdl.core.errors import CollectiveError, ConfigError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

_HEAD_WORDS = 8


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
        extra: what may differ: rows to gather.
        on_device: whether the tensors are a GPU's.
    """

    kind: Kind
    what: str
    numel: int = 0
    dtype: int = 0
    extra: int = 0
    on_device: bool = False

    def words(self) -> list[int]:
        """Return it as `_HEAD_WORDS` whole numbers."""
        digest = hashlib.blake2b(self.what.encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little", signed=True)
        return [self.kind, number, self.numel, self.dtype, self.extra, self.on_device, 0, 0]


class TensorGroup:
    """Members of one process set, of which each call blocks; see `Group` for what they share.

    Args:
        rank: of this member, within the group.
        size: of the group.
        store: reaches the members, and no other group.
        host: this member's own address; any by default.
        timeout_s: of each operation.
    """

    def __init__(self, rank: int, size: int, store: Store, host: str, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._timeout_s = timeout_s
        self._broken: str | None = None
        self._nccl: Any = None
        with self._named_errors("connecting"):
            self._gloo = _gloo(store, rank, size, host, timeout_s)
        self._steps: list[Callable[[], None]] = []

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
        self.agree(Call(Kind.ALL_REDUCE, what, numel, dtype, on_device=flat.is_cuda))
        return self.reduce_now_(flat, op, prescale, postscale)

    def reduce_now_(
        self, flat: torch.Tensor, op: Op, prescale: float = 1.0, postscale: float = 1.0
    ) -> torch.Tensor:
        """Do what `all_reduce_` does, when the members have agreed on it already."""
        if op is Op.AVERAGE:
            postscale = postscale / self.size
        scale_(flat, prescale)
        wide = flat.to(_wider().get(flat.dtype, flat.dtype))  # itself, if gloo knows the dtype
        with self._named_errors("all_reduce"):
            self._wait(self._of(flat).allreduce([wide], _options(op, self._timeout_s)))
        scale_(wide, postscale)
        return flat if wide is flat else flat.copy_(wide)

    def all_gather(self, tensor: torch.Tensor, what: str = "") -> tuple[torch.Tensor, list[int]]:
        """Return the rows of all members by rank, and how many came from each."""
        import torch

        tensor = _rows(tensor)
        shape = list(tensor.shape[1:])
        heads = self.agree(
            _call(Kind.ALL_GATHER, f"{what}, {tensor.dtype} [rows, {shape}]", tensor, len(tensor))
        )
        counts = [head[4] for head in heads]
        out = torch.empty((sum(counts), *shape), dtype=tensor.dtype, device=tensor.device)
        row_nbytes = _row_nbytes(tensor)
        if out.numel():
            nbytes = [count * row_nbytes for count in counts]
            with self._named_errors("all_gather"):
                self._gather(_bytes(tensor), _bytes(out), nbytes)
        return out, counts

    def broadcast_(self, tensor: torch.Tensor, root: int, what: str = "") -> torch.Tensor:
        """Fill a contiguous tensor with that of member `root`, and return it."""
        if not 0 <= root < self.size:
            raise ConfigError(f"root={root}: the group has the ranks 0 to {self.size - 1}")
        said = f"{what}, {tensor.dtype} {list(tensor.shape)}, from rank {root}"
        self.agree(_call(Kind.BROADCAST, said, tensor))
        if tensor.numel():
            with self._named_errors("broadcast"):
                self._broadcast(_bytes(tensor), root)
        return tensor

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
        with self._named_errors("all_to_all"):
            self._all_gather_even(torch.tensor(sent, dtype=torch.int64), all_sent)
        got = all_sent.view(self.size, self.size)[:, self.rank].tolist()
        out = torch.empty((sum(got), *shape), dtype=tensor.dtype, device=tensor.device)
        self._exchange(tensor, out, sent, got)
        return out, got

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
        said = f"{what}, {op.value}, {tensor.dtype} {list(tensor.shape)}"
        self.agree(_call(Kind.REDUCE_SCATTER, said, tensor))
        sent = shares(len(tensor), self.size)
        mine = sent[self.rank]
        parts = tensor.new_empty((self.size, mine, *tensor.shape[1:]))
        self._exchange(tensor, parts, sent, [mine] * self.size)
        scale_(parts, prescale)
        out = _reduced(parts, op)
        return scale_(out, postscale / self.size if op is Op.AVERAGE else postscale)

    def barrier(self) -> None:
        """Wait until all members have called this."""
        self.agree(Call(Kind.BARRIER, ""))

    def register_step(self, join_step: Callable[[], None]) -> int:
        """Return the number of an operation of several reductions, for `step`.

        Args:
            join_step: takes part in the reductions for a member that has joined; called after
                the members have agreed on the step.
        """
        self._steps.append(join_step)
        return len(self._steps) - 1

    def step(self, number: int, what: str) -> None:
        """Agree on the reductions that belong to a registered step; `reduce_now_` does them."""
        self.agree(Call(Kind.STEP, f"step {number}: {what}", extra=number))

    def join(self) -> int:
        """See `Group.join`."""
        was_joined: set[int] = set()
        while True:
            heads = self.agree(Call(Kind.JOIN, "join()"))
            active = [head for head in heads if head[0] != Kind.JOIN]
            joined = {rank for rank, head in enumerate(heads) if head[0] == Kind.JOIN}
            if not active:
                return max(joined - was_joined, default=max(joined))
            was_joined = joined
            self._join_in(active[0])

    def _join_in(self, head: list[int]) -> None:
        import torch

        if head[0] == Kind.STEP:
            self._steps[head[4]]()
        else:
            device = "cuda" if head[5] else "cpu"
            self.reduce_now_(torch.zeros(head[2], dtype=dtypes()[head[3]], device=device), Op.SUM)

    def agree(self, call: Call) -> list[list[int]]:
        """Compare with what the other members are about to do; return their words, by rank.

        Raises:
            CollectiveError: on all members, if it is not the same; it tells what each called.
        """
        import torch

        heads = torch.empty(self.size * _HEAD_WORDS, dtype=torch.int64)
        with self._named_errors(call.kind.name.lower()):
            self._all_gather_even(torch.tensor(call.words(), dtype=torch.int64), heads)
        words: list[list[int]] = heads.view(self.size, _HEAD_WORDS).tolist()
        kinds = {head[0] for head in words}
        same = {tuple(head[:4]) for head in words if head[0] != Kind.JOIN}
        is_joinable = kinds <= {Kind.JOIN, Kind.ALL_REDUCE, Kind.STEP}
        if len(same) > 1 or (Kind.JOIN in kinds and not is_joinable):
            self._refuse(call, is_join=len(same) <= 1)
        return words

    def _refuse(self, call: Call, is_join: bool) -> None:
        import torch

        mine = torch.zeros(256, dtype=torch.uint8)
        text = f"{call.kind.name.lower()} {call.what}".encode()[:256]
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        all_texts = torch.empty(256 * self.size, dtype=torch.uint8)
        self._all_gather_even(mine, all_texts)
        lines = [
            f"  rank {rank}: {bytes(row.tolist()).rstrip(bytes(1)).decode(errors='replace')}"
            for rank, row in enumerate(all_texts.view(self.size, 256))
        ]
        why = (
            "only sums and averages can be reduced while a member has joined"
            if is_join
            else "all must call the same, in the same order, with the same shapes and dtypes"
        )
        raise CollectiveError("\n".join([f"the members called different things; {why}:", *lines]))

    def close(self) -> None:
        """Let the connections go."""
        self._broken = "it was closed"
        for backend in (self._gloo, self._nccl):
            if backend is not None:
                backend.shutdown()
        self._gloo = self._nccl = None

    # The bytes

    def _of(self, tensor: torch.Tensor) -> Any:
        """Return the backend for a tensor's device; NCCL's is made when it is first needed."""
        if not tensor.is_cuda:
            return self._gloo
        if self._nccl is None:
            self._nccl = _nccl(self._store, self.rank, self.size, self._timeout_s)
        return self._nccl

    def _all_gather_even(self, mine: torch.Tensor, out: torch.Tensor) -> None:
        """Gather as many bytes from each member into one flat tensor."""
        self._wait(self._of(mine).allgather([list(out.chunk(self.size))], [mine]))

    def _gather(self, mine: torch.Tensor, out: torch.Tensor, nbytes: list[int]) -> None:
        """Gather bytes, of which each member has its own number."""
        import torch

        largest = max(nbytes)
        if min(nbytes) == largest:
            self._all_gather_even(mine, out)
        elif largest * self.size <= 2 * sum(nbytes):
            padded = torch.empty(largest, dtype=torch.uint8, device=mine.device)
            padded[: mine.numel()] = mine
            wide = torch.empty(largest * self.size, dtype=torch.uint8, device=mine.device)
            self._all_gather_even(padded, wide)
            rows = wide.view(self.size, largest)
            torch.cat([row[:count] for row, count in zip(rows, nbytes, strict=True)], out=out)
        else:
            for root, part in enumerate(out.split(nbytes)):
                if root == self.rank:
                    part.copy_(mine)
                if part.numel():
                    self._broadcast(part, root)

    def _broadcast(self, data: torch.Tensor, root: int) -> None:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = root
        options.timeout = timedelta(seconds=self._timeout_s)
        self._wait(self._of(data).broadcast([data], options))

    def _exchange(
        self, tensor: torch.Tensor, out: torch.Tensor, sent: list[int], got: list[int]
    ) -> None:
        """Exchange rows: `sent` of them to each member, `got` from each."""
        row_nbytes = _row_nbytes(tensor)
        nbytes = ([count * row_nbytes for count in counts] for counts in (got, sent))
        with self._named_errors("all_to_all"):
            self._wait(self._of(tensor).alltoall_base(_bytes(out), _bytes(tensor), *nbytes))

    def _wait(self, work: Any) -> None:
        work.wait(timedelta(seconds=self._timeout_s))

    @contextmanager
    def _named_errors(self, doing: str) -> Iterator[None]:
        if self._broken is not None:
            raise CollectiveError(f"this group can't {doing} any more: {self._broken}")
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, CollectiveError):
                raise
            self._broken = f"{doing} failed: {str(error).splitlines()[0]}"
            raise CollectiveError(
                f"rank {self.rank} of {self.size}: {self._broken}. A node was lost, or not all "
                f"called this within {self._timeout_s:g} s"
            ) from error


def dtypes() -> list[torch.dtype]:
    """Return the dtypes that can be reduced."""
    import torch

    whole = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
    return [torch.float32, torch.float64, torch.float16, torch.bfloat16, *whole]


def _wider() -> dict[torch.dtype, torch.dtype]:
    """Return what is reduced in the place of dtypes that gloo does not know."""
    import torch

    return {torch.int16: torch.int32, torch.bool: torch.uint8}


def _call(kind: Kind, what: str, tensor: torch.Tensor, extra: int = 0) -> Call:
    return Call(kind, what, extra=extra, on_device=tensor.is_cuda)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(1) if tensor.dim() == 0 else tensor.contiguous()


def _row_nbytes(tensor: torch.Tensor) -> int:
    count: int = tensor.element_size()
    for length in tensor.shape[1:]:
        count *= length
    return count


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, without copying them."""
    import torch

    return tensor.view(-1).view(torch.uint8)


def scale_(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply in place; whole numbers are rounded towards zero."""
    import torch

    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.mul_(factor)
    return tensor.copy_((tensor.to(torch.float64) * factor).trunc())


def _reduced(parts: torch.Tensor, op: Op) -> torch.Tensor:
    """Return `[size, …]` reduced over the first dimension, in the same dtype."""
    import torch

    if op in (Op.SUM, Op.AVERAGE):
        return parts.sum(0, dtype=parts.dtype)
    if op is Op.PRODUCT:
        return parts.prod(0, dtype=parts.dtype)
    return torch.amin(parts, 0) if op is Op.MIN else torch.amax(parts, 0)


def _options(op: Op, timeout_s: float) -> Any:
    from torch.distributed import AllreduceOptions, ReduceOp

    names = {Op.SUM: ReduceOp.SUM, Op.AVERAGE: ReduceOp.SUM, Op.MIN: ReduceOp.MIN}
    names |= {Op.MAX: ReduceOp.MAX, Op.PRODUCT: ReduceOp.PRODUCT}
    options = AllreduceOptions()
    options.reduceOp = names[op]
    options.timeout = timedelta(seconds=timeout_s)
    return options


def _gloo(store: Store, rank: int, size: int, host: str, timeout_s: float) -> Any:
    from torch.distributed import PrefixStore, ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 2
    try:
        device = ProcessGroupGloo.create_device(hostname=host)
    except RuntimeError:  # the address is not one of this machine's own, as behind a NAT
        device = ProcessGroupGloo.create_default_device()
    options._devices = [device]
    return ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)


def _nccl(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    from torch.distributed import PrefixStore, ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
