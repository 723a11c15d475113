"""The connections of one group, by process groups of PyTorch, and its arithmetic on tensors.

The process groups are made without `init_process_group`: PyTorch's default one stays the user's.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import CollectiveError, ConfigError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store


class Op(Enum):
    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"

    @property
    def is_sum(self) -> bool:
        """Whether it adds, so that zeros of a member do no harm."""
        return self in (Op.SUM, Op.AVERAGE)


@dataclass(frozen=True)
class Reduction:
    """How tensors of the members become one, element by element.

    Attributes:
        op: `AVERAGE` of whole numbers is rounded towards zero.
        prescale, postscale: factors before and after it.
    """

    op: Op = Op.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0

    def __str__(self) -> str:
        return f"{self.op.value}, x {self.prescale:g}, x {self.postscale:g}"


class NoTransport:
    def close(self) -> None:
        """Do nothing."""

    def announce(self, mine: bytes) -> list[bytes]:
        return [mine]

    def reduce_(self, flat: torch.Tensor, op: Op) -> None:
        """Leave the tensor as it is."""

    def gather(self, mine: torch.Tensor, out: torch.Tensor, nbytes: list[int]) -> None:
        out.copy_(mine)

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        """Leave the bytes as they are."""

    def exchange(
        self, tensor: torch.Tensor, out: torch.Tensor, sent: list[int], got: list[int]
    ) -> None:
        out.view(-1).copy_(tensor.view(-1))

    @contextmanager
    def named_errors(self, doing: str) -> Iterator[None]:
        yield


class Transport:
    """The connections: gloo's for tensors on CPUs, NCCL's for those on GPUs.

    Args:
        store: reaches the members, and no other group.
        timeout_s: of each operation.
    """

    def __init__(self, rank: int, size: int, store: Store, host: str, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._timeout_s = timeout_s
        self._timeout = timedelta(seconds=timeout_s)
        self._broken: str | None = None
        self._nccl: Any = None
        with self.named_errors("connect"):
            self._gloo = _gloo_backend(store, rank, size, host, timeout_s)
            # Else a member could end at once, and the store with it, while another one connects.
            self.announce(b"\0")

    def close(self) -> None:
        """Let the connections go; members that wait for this one fail."""
        self._broken = "it was closed"
        for backend in (self._gloo, self._nccl):
            if backend is not None:
                backend.shutdown()
        self._gloo = self._nccl = None

    def announce(self, mine: bytes) -> list[bytes]:
        """Return what the members have called this with, by rank; all with as many bytes."""
        import torch

        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        whole = own.new_empty(len(mine) * self.size)
        self._gather_even(own, whole)
        return [part.numpy().tobytes() for part in whole.split(len(mine))]

    def reduce_(self, flat: torch.Tensor, op: Op) -> None:
        """Reduce a contiguous tensor in place; an average is a sum here."""
        self._wait(self._of(flat).allreduce([flat], _reduce_options(op, self._timeout_s)))

    def _of(self, tensor: torch.Tensor) -> Any:
        """Return the backend for a tensor's device; NCCL's is made when it is first needed."""
        if not tensor.is_cuda:
            return self._gloo
        if self._nccl is None:
            self._nccl = _nccl_backend(self._store, self.rank, self.size, self._timeout_s)
        return self._nccl

    def _gather_even(self, mine: torch.Tensor, out: torch.Tensor) -> None:
        self._wait(self._of(mine)._allgather_base(out, mine))

    def gather(self, mine: torch.Tensor, out: torch.Tensor, nbytes: list[int]) -> None:
        """Gather bytes; their number differs between members."""
        import torch

        largest = max(nbytes)
        if min(nbytes) == largest:
            self._gather_even(mine, out)
        # Padding doubles the bytes at most; one large member does not inflate all others.
        elif largest * self.size <= 2 * sum(nbytes):
            padded = torch.empty(largest, dtype=torch.uint8, device=mine.device)
            padded[: mine.numel()] = mine
            wide = torch.empty(largest * self.size, dtype=torch.uint8, device=mine.device)
            self._gather_even(padded, wide)
            rows = wide.view(self.size, largest)
            torch.cat([row[:count] for row, count in zip(rows, nbytes, strict=True)], out=out)
        else:
            for root, part in enumerate(out.split(nbytes)):
                if root == self.rank:
                    part.copy_(mine)
                if part.numel():
                    self.broadcast(part, root)

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        """Fill bytes with those of member `root`."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = root
        options.timeout = self._timeout
        self._wait(self._of(data).broadcast([data], options))

    def exchange(
        self, tensor: torch.Tensor, out: torch.Tensor, sent: list[int], got: list[int]
    ) -> None:
        """Exchange rows: `sent` of them to each member, `got` from each."""
        size = row_nbytes(tensor)
        nbytes = ([count * size for count in counts] for counts in (got, sent))
        self._wait(self._of(tensor).alltoall_base(bytes_of(out), bytes_of(tensor), *nbytes))

    def _wait(self, work: Any) -> None:
        work.wait(self._timeout)

    @contextmanager
    def named_errors(self, doing: str) -> Iterator[None]:
        """Turn PyTorch's errors inside into one that names the operation; the group is broken then.

        Members may have got different parts of a failed operation, so no other can follow it.
        """
        if self._broken is not None:
            raise CollectiveError(f"this group is broken and cannot run {doing}: {self._broken}")
        try:
            yield
        except (RuntimeError, OSError) as error:
            if isinstance(error, CollectiveError):
                raise
            self._broken = f"{doing} failed: {str(error).splitlines()[0]}"
            # gloo's connections end with the last reference to them: so members that wait for this
            # one learn of one that has gone.
            traceback.clear_frames(error.__traceback__)
            self._gloo = None
            raise CollectiveError(
                f"rank {self.rank} of {self.size}: {self._broken}. A node was lost, or not all "
                f"called this within {self._timeout_s:g} s"
            ) from error


def row_nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.element_size() * math.prod(tensor.shape[1:]))


def shares(rows: int, size: int) -> list[int]:
    """Return how many of the rows each member gets; the first ones get one more."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def even_splits(rows: int, size: int, splits: Sequence[int] | None) -> list[int]:
    if splits is None or len(splits) == 0:
        if rows % size:
            raise ConfigError(
                f"{rows} rows cannot be shared out evenly among {size} members: give splits"
            )
        return [rows // size] * size
    counts = [int(count) for count in splits]
    if len(counts) != size or sum(counts) != rows or min(counts) < 0:
        raise ConfigError(
            f"splits={counts}: must be {size} numbers of 0 or more, one for each member, with the "
            f"sum {rows}"
        )
    return counts


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, without copying them."""
    import torch

    if not tensor.numel():  # its strides may be anything, and then PyTorch makes no view
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.view(-1).view(torch.uint8)


@cache
def dtypes() -> tuple[torch.dtype, ...]:
    import torch

    whole = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
    return (torch.float32, torch.float64, torch.float16, torch.bfloat16, *whole)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in a dtype that gloo reduces; the same one if it has it already."""
    import torch

    if tensor.dtype is torch.bool:
        return tensor.to(torch.uint8)
    return tensor.to(torch.int32) if tensor.dtype is torch.int16 else tensor


def scale_(tensor: torch.Tensor, factor: float, divisor: int = 1) -> torch.Tensor:
    """Multiply by `factor / divisor` in place; whole numbers are rounded towards zero."""
    import torch

    if factor == divisor:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.mul_(factor / divisor)
    if factor == 1.0:
        # As whole numbers: float64 is exact only up to 2**53.
        return tensor.copy_(torch.div(tensor, divisor, rounding_mode="trunc"))
    return tensor.copy_((tensor.to(torch.float64) * factor / divisor).trunc())


def reduced(parts: torch.Tensor, op: Op) -> torch.Tensor:
    """Return `[size, …]` reduced over the first dimension, in the same dtype."""
    import torch

    if op.is_sum:
        # PyTorch adds small whole numbers up in int64 unless it is told the dtype.
        return parts.sum(0, dtype=parts.dtype)
    if op is Op.PRODUCT:
        return parts.prod(0, dtype=parts.dtype)
    return torch.amin(parts, 0) if op is Op.MIN else torch.amax(parts, 0)


@cache
def _reduce_options(op: Op, timeout_s: float) -> Any:
    from torch.distributed import AllreduceOptions, ReduceOp

    name = "SUM" if op is Op.AVERAGE else op.name
    options = AllreduceOptions()
    options.reduceOp = getattr(ReduceOp, name)
    options.timeout = timedelta(seconds=timeout_s)
    return options


def _gloo_backend(store: Store, rank: int, size: int, host: str, timeout_s: float) -> Any:
    from torch.distributed import PrefixStore, ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 2
    try:
        device = ProcessGroupGloo.create_device(hostname=host)
    except RuntimeError:  # the address is not one of this machine's own, as behind a NAT
        device = ProcessGroupGloo.create_default_device()
    options._devices = [device]
    # A prefix, so that keys of gloo and NCCL cannot be the same.
    return ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)


def _nccl_backend(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    """Return a process group for GPUs; its members connect when they first reduce."""
    from torch.distributed import PrefixStore, ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
