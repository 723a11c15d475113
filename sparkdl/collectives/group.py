"""`Group`: the collective operations of a process set, on tensors of PyTorch.

All members call the same methods in the same order. Each call returns when this member's part is
done, or raises within the group's timeout. Other frameworks lend their tensors by DLPack.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from functools import update_wrapper
from importlib.util import find_spec
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import cloudpickle

from sparkdl.collectives.transport import (
    NoTransport,
    Op,
    Reduction,
    Transport,
    bytes_of,
    dtypes,
    even_splits,
    reduced,
    row_nbytes,
    scale_,
    shares,
    widened,
)
from sparkdl.core.errors import CollectiveError, ConfigError, FrameworkMissingError, MismatchError
from sparkdl.core.exchange import collective_used

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
T = TypeVar("T")
_Item = tuple[Callable[[], Any], "Future[Any]", str | None]


class Kind(IntEnum):
    JOIN = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    BROADCAST = 3
    ALL_TO_ALL = 4
    REDUCE_SCATTER = 5
    BARRIER = 6


class Call(NamedTuple):
    """One operation, as a member announces it: whole numbers of 64 bits.

    Why announce? gloo does not compare what members call. If one member reduces more numbers than
    another, the other's process is aborted (`op.preamble.length <= op.nbytes` is thrown in a thread
    of gloo's), and as many numbers of another kind are added up in silence. A member may therefore
    enter gloo only when it knows that all do. One that has joined learns the shape of its zeros.

    Attributes:
        digest: of the arguments that must be the same on all members.
        numel: how many numbers to reduce; members that have joined contribute as many zeros.
        dtype: of these, an index into `transport.dtypes()`.
        extra: a number that may differ: rows to gather; for `JOIN`, the operations it has stood in
            for.
        on_device: whether the tensors are a GPU's.
        is_sum: whether zeros from members that have joined leave the result right.
    """

    kind: int
    digest: int
    numel: int = 0
    dtype: int = 0
    extra: int = 0
    on_device: int = False
    is_sum: int = True


_WORDS = struct.Struct(f"<{len(Call._fields)}q192s")
"""A call, and the beginning of its arguments in words, for the error of calls that differ."""


def objection(calls: Sequence[Call]) -> str | None:
    """Return the reason why the members' announcements do not match, or `None` if they do."""
    active = [call for call in calls if call.kind != Kind.JOIN]
    if len({(call.kind, call.digest, call.numel, call.dtype) for call in active}) > 1:
        return "all must call the same, in the same order, with the same shapes and dtypes"
    if not active or len(active) == len(calls):
        return None
    if active[0].kind == Kind.ALL_REDUCE and all(call.is_sum for call in active):
        return None
    return "only sums and averages can be reduced while a member has joined"


def last_to_join(calls: Sequence[Call]) -> int:
    """Return the rank of the member that joined last: it has stood in for the fewest operations.

    Of several it is the highest rank, on all members; they have seen the same.
    """
    return max(range(len(calls)), key=lambda rank: (-calls[rank].extra, rank))


_SEAL_NBYTES = hashlib.sha256().digest_size


def sealed(value: Any, key: bytes) -> bytes:
    """Return an object for other members: its HMAC (RFC 2104, SHA-256), and the pickled value.

    They cross unauthenticated connections. The key came over the driver's authenticated ones, and
    nothing without the seal is unpickled.
    """
    data: bytes = cloudpickle.dumps(value)
    return hmac.digest(key, data, "sha256") + data


def open_sealed(data: bytes, key: bytes) -> Any:
    seal, body = data[:_SEAL_NBYTES], data[_SEAL_NBYTES:]
    if not hmac.compare_digest(seal, hmac.digest(key, body, "sha256")):
        raise CollectiveError(
            "received an object without this group's signature: another program connects to the "
            "ports of this training. Let only the cluster's hosts reach them"
        )
    return cloudpickle.loads(body)


class SerialExecutor:
    """Runs work in the order in which it was given: `submit` in a thread, `run` in the caller's.

    Work that calls `run` itself goes on at once.

    Args:
        thread_name: of the thread, which starts with the first `submit`. It is a daemon, so that a
            process that fails with operations under way can end.
    """

    def __init__(self, thread_name: str) -> None:
        self._thread_name = thread_name
        self._turn = threading.Lock()
        self._state = threading.Lock()
        self._owner = 0
        self._waiting = 0
        self._under_way: set[str] = set()
        self._items: SimpleQueue[_Item | None] | None = None

    def submit(self, work: Callable[[], T], name: str | None = None) -> Future[T]:
        """Call `work` in the thread, after all that was given before.

        Nothing else of its name can be given until it is done.
        """
        future: Future[T] = Future()
        with self._state:
            self._claim(name)
            if self._items is None:
                self._items = SimpleQueue()
                threading.Thread(
                    target=self._serve, args=(self._items,), name=self._thread_name, daemon=True
                ).start()
            self._waiting += 1
            self._items.put((work, future, name))
        return future

    def run(self, work: Callable[[], T], name: str | None = None) -> T:
        """Call `work` here, after all that was given before, and return its result.

        While the thread is idle this costs two locks, and no switch to another thread.
        """
        if self._owner == threading.get_ident():
            return work()
        with self._state:
            # Work that waits was given before, and must not be overtaken.
            mine = not self._waiting and self._turn.acquire(blocking=False)
            if mine:
                self._claim(name)
        if not mine:
            return self.submit(work, name).result()
        self._owner = threading.get_ident()
        try:
            return work()
        finally:
            self._owner = 0
            with self._state:
                self._under_way.discard(name or "")
            self._turn.release()

    def close(self) -> None:
        """End the thread after the submitted calls. `submit` would start another one."""
        with self._state:
            items, self._items = self._items, None
        if items is not None:
            items.put(None)

    def _serve(self, items: SimpleQueue[_Item | None]) -> None:
        while (item := items.get()) is not None:
            work, future, name = item
            try:
                with self._turn:
                    self._owner = threading.get_ident()
                    try:
                        result = work()
                    finally:
                        self._owner = 0
            except BaseException as error:  # noqa: BLE001 (it is the waiter's)
                self._done(name, future.set_exception, error)
            else:
                self._done(name, future.set_result, result)

    def _done(self, name: str | None, report: Callable[[Any], None], outcome: Any) -> None:
        with self._state:
            self._waiting -= 1
            self._under_way.discard(name or "")
        # Last: whoever waits may give work of the same name at once, and callbacks run in here.
        report(outcome)

    def _claim(self, name: str | None) -> None:
        if name in self._under_way:
            raise ConfigError(
                f"{name} is under way already: give each operation its own name, or "
                "synchronize the first one before the next"
            )
        if name:
            self._under_way.add(name)


def _operation(operate: Callable[Concatenate[Group, P], T]) -> Callable[Concatenate[Group, P], T]:
    def in_turn(self: Group, /, *args: P.args, **options: P.kwargs) -> T:
        return self.run(lambda: operate(self, *args, **options))

    return update_wrapper(in_turn, operate)


class Group(SerialExecutor):
    """The members of one process set. Its operations take their turn, see `SerialExecutor`.

    Before each operation the members exchange 256 bytes that announce it. A mismatch therefore
    raises an error with each member's call, and members that have joined contribute zeros.

    Args:
        rank: within the group.
        ranks: of all members, in the world; in ascending order.
        subwire: connects the members of a subgroup by its number, a rank in it and its size.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        wire: Transport | NoTransport,
        key: bytes = b"",
        subwire: Callable[[str, int, int], Transport] | None = None,
        number: str = "world",
    ) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self._wire = wire
        self._key = key
        self._subwire = subwire
        self._number = number
        self._subgroups: list[Group] = []
        self._count = 0
        super().__init__(f"sparkdl-collectives-{self.ranks}")

    def __repr__(self) -> str:
        return f"Group(rank {self.rank} of {self.size}, ranks={self.ranks})"

    @property
    def size(self) -> int:
        return len(self.ranks)

    @_operation
    def all_reduce_(
        self, flat: torch.Tensor, how: Reduction = Reduction(), what: str = ""
    ) -> torch.Tensor:
        """Reduce a contiguous tensor in place, element by element, and return it.

        Args:
            what: for the comparison with the other members: names and shapes.

        Raises:
            MismatchError: if members called something else; the group works on.
            CollectiveError: if not all members came in time, or one was lost.
        """
        numel, dtype = flat.numel(), dtypes().index(flat.dtype)
        what = f"all_reduce({how}, {what}, {flat.dtype})"
        is_sum, on_device = how.op.is_sum, flat.is_cuda
        self._agree(Kind.ALL_REDUCE, what, numel, dtype, on_device=on_device, is_sum=is_sum)
        return self._reduce_(flat, how)

    def _reduce_(self, flat: torch.Tensor, how: Reduction) -> torch.Tensor:
        if not flat.numel():  # all know it, so none enters gloo
            return flat
        scale_(flat, how.prescale)
        wide = widened(flat)
        with self._wire.named_errors("all_reduce"):
            self._wire.reduce_(wide, how.op)
        self._finished_(wide, how)
        return flat if wide is flat else flat.copy_(wide)

    @_operation
    def all_gather(self, tensor: torch.Tensor, what: str = "") -> tuple[torch.Tensor, list[int]]:
        """Return the rows of all members by rank, and how many came from each.

        The number of rows may differ between members, what follows in the shape may not.
        """
        tensor = _rows(tensor)
        shape = list(tensor.shape[1:])
        what = f"{what}, {tensor.dtype} [rows, {shape}]"
        calls = self._agree(Kind.ALL_GATHER, what, extra=len(tensor))
        counts = [each.extra for each in calls]
        nbytes = [count * row_nbytes(tensor) for count in counts]
        out = tensor.new_empty((sum(counts), *shape))
        if out.numel():
            with self._wire.named_errors("all_gather"):
                self._wire.gather(bytes_of(tensor), bytes_of(out), nbytes)
        return out, counts

    @_operation
    def broadcast_(self, tensor: torch.Tensor, root: int, what: str = "") -> torch.Tensor:
        """Fill a contiguous tensor with that of member `root`, a rank within the group."""
        if not 0 <= root < self.size:
            raise ConfigError(f"root={root}: must be a rank of the group, 0 to {self.size - 1}")
        what = f"{what}, {tensor.dtype} {list(tensor.shape)}, from rank {root}"
        self._agree(Kind.BROADCAST, what)
        if tensor.numel():
            with self._wire.named_errors("broadcast"):
                self._wire.broadcast(bytes_of(tensor), root)
        return tensor

    @_operation
    def all_to_all(
        self, tensor: torch.Tensor, splits: Sequence[int] | None = None, what: str = ""
    ) -> tuple[torch.Tensor, list[int]]:
        """Return the rows sent to this member by rank, and how many came from each."""
        tensor = _rows(tensor)
        sent = even_splits(len(tensor), self.size, splits)
        shape = list(tensor.shape[1:])
        what = f"{what}, {tensor.dtype} [rows, {shape}]"
        self._agree(Kind.ALL_TO_ALL, what)
        # A member must know how many rows each of the others sends it.
        row = struct.Struct(f"<{self.size}q")
        with self._wire.named_errors("all_to_all"):
            counts = [row.unpack(each) for each in self._wire.announce(row.pack(*sent))]
        got = [each[self.rank] for each in counts]
        out = tensor.new_empty((sum(got), *shape))
        # All members know all counts, so either all enter gloo or none does.
        if any(map(any, counts)):
            with self._wire.named_errors("all_to_all"):
                self._wire.exchange(tensor, out, sent, got)
        return out, got

    @_operation
    def reduce_scatter(
        self, tensor: torch.Tensor, how: Reduction = Reduction(), what: str = ""
    ) -> torch.Tensor:
        """Return this member's share of the rows, reduced; the first members get one more."""
        tensor = _rows(tensor)
        what = f"{what}, {how}, {tensor.dtype} {list(tensor.shape)}"
        self._agree(Kind.REDUCE_SCATTER, what)
        sent = shares(len(tensor), self.size)
        mine = sent[self.rank]
        parts = tensor.new_empty((self.size, mine, *tensor.shape[1:]))
        if tensor.numel():
            with self._wire.named_errors("reduce_scatter"):
                self._wire.exchange(tensor, parts, sent, [mine] * self.size)
        return self._finished_(reduced(scale_(parts, how.prescale), how.op), how)

    def _finished_(self, result: torch.Tensor, how: Reduction) -> torch.Tensor:
        return scale_(result, how.postscale, self.size if how.op is Op.AVERAGE else 1)

    @_operation
    def barrier(self) -> None:
        self._agree(Kind.BARRIER, "")

    def join(self) -> int:
        """Take part with zeros in what the others reduce, until all have called this.

        Averages are over all members, with zeros of the joined ones. An optimizer's own group is
        joined, too: all members must have made the same optimizers before.

        Returns:
            The rank of the member that called it last.

        Raises:
            CollectiveError: in a member that calls something else than sums and averages while
                others have joined; those wait on.
        """
        # In their threads, because all of them and this one wait for the others at the same time.
        waits = [group.submit(group.join) for group in self.twins]
        last = self._join()
        for wait in waits:
            wait.result()
        return last

    @property
    def twins(self) -> list[Group]:
        """The groups of the same members: those of optimizers."""
        return [group for group in self._subgroups if group.size == self.size]

    @_operation
    def _join(self) -> int:
        import torch

        stood_in = 0
        while True:
            calls = self._agree(Kind.JOIN, "join()", extra=stood_in)
            active = [call for call in calls if call.kind != Kind.JOIN]
            if not active:
                return last_to_join(calls)
            stood_in += 1
            if objection(calls) is None:
                call = active[0]
                device, dtype = "cuda" if call.on_device else "cpu", dtypes()[call.dtype]
                zeros = torch.zeros(call.numel, dtype=dtype, device=device)
                self._reduce_(zeros, Reduction(Op.SUM))

    def _agree(self, kind: Kind, what: str, *numbers: int, **others: int) -> list[Call]:
        """Compare this call with the other members' announcements; return these, by rank.

        Args:
            what: the arguments that must be the same on all members, in words.
            numbers, others: of the `Call`.
        """
        # Python's own `hash` of a text differs between processes.
        data = hashlib.blake2b(what.encode(), digest_size=8).digest()
        call = Call(kind, int.from_bytes(data, "little", signed=True), *numbers, **others)
        with self._wire.named_errors(kind.name.lower()):
            own = _WORDS.pack(*call, f"{kind.name.lower()} {what}".encode())
            everyone = [_WORDS.unpack(each) for each in self._wire.announce(own)]
        calls = [Call(*each[:-1]) for each in everyone]
        # One that has joined did nothing wrong.
        if kind is not Kind.JOIN and (why := objection(calls)) is not None:
            texts = [each[-1].rstrip(b"\0").decode(errors="replace") for each in everyone]
            lines = [f"  rank {rank}: {text}" for rank, text in enumerate(texts)]
            raise MismatchError("\n".join([f"the members' calls differ; {why}:", *lines]))
        return calls

    def all_gather_object(self, value: Any, name: str | None = None) -> list[Any]:
        import torch

        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(sealed(value, self._key)), dtype=torch.uint8)
        whole, counts = self.all_gather(data, name or "")
        parts = whole.split(counts)
        return [open_sealed(part.numpy().tobytes(), self._key) for part in parts]

    def broadcast_object(self, value: Any, root: int = 0, name: str | None = None) -> Any:
        return value if self.size == 1 else self._broadcast_object(value, root, name or "")

    @_operation
    def _broadcast_object(self, value: Any, root: int, what: str) -> Any:
        import torch

        data = bytearray(sealed(value, self._key) if self.rank == root else b"")
        what = f"{what}, object, from rank {root}"
        calls = self._agree(Kind.BROADCAST, what, extra=len(data))
        data = data or bytearray(calls[root].extra)
        whole = torch.frombuffer(data, dtype=torch.uint8)
        with self._wire.named_errors("broadcast"):
            self._wire.broadcast(whole, root)
        return value if self.rank == root else open_sealed(whole.numpy().tobytes(), self._key)

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """Return the group of some members; all members call it, with the same ranks.

        `None` on members that are not in it.
        """
        wanted = self.members(ranks)
        self._count += 1  # of those without this member as well, so that all agree on the number
        if self.rank not in wanted:
            return None
        number, rank, size = f"{self._number}/{self._count}", wanted.index(self.rank), len(wanted)
        wire: Transport | NoTransport = NoTransport()
        if size > 1:
            assert self._subwire is not None, "one of several members has connections"
            wire = self._subwire(number, rank, size)
        in_world = [self.ranks[each] for each in wanted]
        group = Group(rank, in_world, wire, self._key, self._subwire, number)
        self._subgroups.append(group)
        return group

    def close(self) -> None:
        """Close the connections: operations in which other members wait for this one fail."""
        super().close()
        for group in self._subgroups:
            group.close()
        with suppress(RuntimeError):
            self._wire.close()

    def members(self, ranks: Sequence[int]) -> list[int]:
        # Sorted, so that all members number them alike.
        wanted = sorted(ranks)
        if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= {*range(self.size)}:
            raise ConfigError(
                f"ranks={list(ranks)}: name some of the ranks 0 to {self.size - 1}, each once"
            )
        return wanted


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(1) if tensor.dim() == 0 else tensor.contiguous()


CONNECT_TIMEOUT_S = 300.0
"""Until the members have reached each other, at most."""


def connect(
    rank: int, size: int, all_gather: Callable[[Any], list[Any]], host: str, timeout_s: float
) -> Group:
    """Connect the members of a world; all of them call this.

    Args:
        all_gather: exchanges plain values of the members, returned by rank, over connections that
            outsiders cannot read.
        host: under which the other members reach this one.
        timeout_s: of the connecting, and of each operation.
    """
    if size == 1:
        return Group(0, (rank,), NoTransport())
    collective_used.set()
    has_torch = find_spec("torch") is not None
    # First, so that its port can travel with the other values.
    store = _store(host, 0, rank, timeout_s) if has_torch and rank == 0 else None
    hello = {"torch": has_torch, "key": secrets.token_bytes(32), "host": host}
    everyone = all_gather({**hello, "port": store.port if store else 0})
    if missing := [number for number, each in enumerate(everyone) if not each["torch"]]:
        raise FrameworkMissingError(
            f"{len(missing)} of {size} nodes have no PyTorch (ranks {missing[:8]}), which carries "
            "the collectives of every framework. Install it on all nodes: pip install torch"
        )
    first = everyone[0]
    store = store or _store(first["host"], first["port"], rank, timeout_s)
    key = first["key"]

    def wire(number: str, rank: int, size: int) -> Transport:
        from torch.distributed import PrefixStore

        # Groups share the store, and each has names of its own in it.
        return Transport(rank, size, PrefixStore(number, store), host, timeout_s)

    return Group(rank, range(size), wire("world", rank, size), key, wire)


def _store(host: str, port: int, rank: int, timeout_s: float) -> Any:
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=min(timeout_s, CONNECT_TIMEOUT_S))
    try:
        return TCPStore(host, port, None, rank == 0, timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {rank} does not reach rank 0 at {host}:{port}: {error}. Nodes must reach each "
            "other on all ports"
        ) from error
