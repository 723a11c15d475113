"""`Group`: the collective operations of a process set, and `connect`, by the best transport.

Runs in: child

All members call the same methods in the same order; each call returns when this member's part is
done, or raises within the group's timeout.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from queue import SimpleQueue
from typing import Any, TypeVar

import cloudpickle
import numpy as np

from sparkdl.core.errors import CollectiveError, ConfigError, FrameworkMissingError
from sparkdl.core.exchange import note_exchange

T = TypeVar("T")
Array = np.ndarray[Any, Any]
_Item = tuple[Callable[[], Any], "Future[Any]", str | None]
TRANSPORTS = {"gloo": "torch", "tensorflow": "tensorflow"}
"""Best first: the module in this package, and the distribution that it needs on all nodes. Each
has `Offer(rank, size, host, timeout_s)` with `address` (plain values, for the other members),
`connect(addresses, key) -> Group` and `withdraw()`."""
_SEAL_NBYTES = hashlib.sha256().digest_size


class Op(Enum):
    """How values of the members become one."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


class SerialExecutor:
    """Runs work in the order in which it was given: `submit` in a thread, `run` in the caller's.

    Args:
        thread_name: of the thread, which starts with the first `submit`. It is a daemon, so that a
            process that fails with operations under way can end.
    """

    def __init__(self, thread_name: str) -> None:
        self._thread_name = thread_name
        self._turn = threading.Lock()
        self._state = threading.Lock()
        self._waiting = 0
        self._under_way: set[str] = set()
        self._items: SimpleQueue[_Item | None] | None = None

    def submit(self, work: Callable[[], T], name: str | None = None) -> Future[T]:
        """Call `work` in the thread, after all that was given before.

        In a group this is for what goes on beside the training: all members submit the same work in
        the same order.

        Args:
            name: of the work; nothing else of this name can be given until it is done.

        Raises:
            ConfigError: if something of this name is under way.
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

        Raises:
            ConfigError: see `submit`.
        """
        with self._state:
            mine = not self._waiting and self._turn.acquire(blocking=False)
            if mine:
                self._claim(name)
        if not mine:
            return self.submit(work, name).result()
        try:
            return work()
        finally:
            with self._state:
                self._under_way.discard(name or "")
            self._turn.release()

    def close(self) -> None:
        """End the thread, after what it was given. `submit` would start another one."""
        with self._state:
            items, self._items = self._items, None
        if items is not None:
            items.put(None)

    def _serve(self, items: SimpleQueue[_Item | None]) -> None:
        while (item := items.get()) is not None:
            work, future, name = item
            try:
                with self._turn:
                    result = work()
            except BaseException as error:  # noqa: BLE001 (it is the waiter's)
                self._done(name, future.set_exception, error)
            else:
                self._done(name, future.set_result, result)

    def _done(self, name: str | None, report: Callable[[Any], None], outcome: Any) -> None:
        with self._state:
            self._waiting -= 1
            self._under_way.discard(name or "")
        report(outcome)

    def _claim(self, name: str | None) -> None:
        if name in self._under_way:
            raise ConfigError(
                f"{name} is under way already: give each operation a name of its own, or "
                "synchronize the first one before the next"
            )
        if name:
            self._under_way.add(name)


class Group(SerialExecutor):
    """The members of one process set. Subclasses move the bytes.

    Arrays are numpy's, on the CPU, of numbers, booleans, or `ml_dtypes.bfloat16`. Results are
    new arrays; arguments are not changed. All operations raise what `all_reduce` raises.

    Args:
        rank: of this member, within the group.
        ranks: of all members, in the world; in ascending order.
        key: a secret of the members, which seals the objects that they send each other.
        timeout_s: until an operation that not all members have joined is an error.
    """

    transport = ""

    def __init__(self, rank: int, ranks: Sequence[int], key: bytes, timeout_s: float) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self.timeout_s = timeout_s
        self._key = key
        self._subgroups: list[Group] = []
        self._count = 0
        super().__init__(f"sparkdl-collectives-{self.ranks}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size}, ranks={self.ranks})"

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.ranks)

    def all_reduce(
        self, arrays: Sequence[Array], op: Op = Op.AVERAGE, name: str | None = None
    ) -> list[Array]:
        """Return the arrays reduced over all members, element by element.

        Arrays of one dtype travel as one.

        Args:
            arrays: any number, of the same shapes and dtypes on all members.
            op: `AVERAGE` of whole numbers is rounded towards zero.
            name: if given, members with another name at this call are an error.

        Raises:
            CollectiveError: if not all members came in time, a member was lost, or members called
                something else.
        """
        raise NotImplementedError

    def all_gather(self, array: Array, name: str | None = None) -> Array:
        """Return the rows of all members, by rank.

        Args:
            array: `[rows, …]`; the rows may differ between members, what follows may not.
        """
        raise NotImplementedError

    def broadcast(self, array: Array, root: int, name: str | None = None) -> Array:
        """Return the array of member `root`.

        Args:
            array: of the same shape and dtype on all members.
            root: a rank within the group.
        """
        raise NotImplementedError

    def all_to_all(
        self, array: Array, splits: Sequence[int] | Array | None = None, name: str | None = None
    ) -> tuple[Array, Array]:
        """Send a part of the rows to each member.

        Args:
            array: `[rows, …]`.
            splits: how many rows each member gets, by rank; by default the same number.

        Returns:
            The rows received, by rank of the sender, and how many came from each, int32 `[size]`.

        Raises:
            ConfigError: if the splits do not fit the rows.
        """
        raise NotImplementedError

    def reduce_scatter(self, array: Array, op: Op = Op.AVERAGE, name: str | None = None) -> Array:
        """Return this member's share of the rows, reduced over all members.

        Args:
            array: `[rows, …]`, of one shape; if they cannot be shared out evenly, the first
                members get one more.
        """
        raise NotImplementedError

    def barrier(self) -> None:
        """Wait until all members have called this."""
        raise NotImplementedError

    def join(self) -> int:
        """Take part with zeros in what the others reduce, until all have called this.

        Returns:
            The rank of the member that called it last.

        Raises:
            CollectiveError: in a member that calls something else than sums and averages while
                others have joined; those wait on.
        """
        raise NotImplementedError

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """Return the group of some members; all members call it, with the same ranks.

        Args:
            ranks: within this group.

        Returns:
            `None` for those that are not in it.
        """
        wanted = self.members(ranks)
        self._count += 1  # of those without this member as well, so that all agree on the number
        if self.rank not in wanted:
            return None
        in_world = [self.ranks[rank] for rank in wanted]
        self._subgroups.append(self._subgroup(wanted.index(self.rank), in_world, self._count))
        return self._subgroups[-1]

    def _subgroup(self, rank: int, ranks: Sequence[int], number: int) -> Group:
        """Connect the members of a subgroup; `number` names it among those of this group."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections: operations in which other members wait for this one fail."""
        super().close()
        for group in self._subgroups:
            group.close()

    def all_gather_object(self, value: Any, name: str | None = None) -> list[Any]:
        """Return the values of all members by rank; anything that can be pickled.

        Raises:
            CollectiveError: also if the bytes were not a member's.
        """
        data = np.frombuffer(sealed(value, self._key), np.uint8)
        sizes = self.all_gather(np.array([data.size], np.int64), name)
        whole = self.all_gather(data, name)
        parts = np.split(whole, np.cumsum(sizes)[:-1])
        return [open_sealed(part.tobytes(), self._key) for part in parts]

    def broadcast_object(self, value: Any, root: int = 0, name: str | None = None) -> Any:
        """Return the value of member `root`; anything that can be pickled."""
        is_root = self.rank == root
        data = np.frombuffer(sealed(value, self._key) if is_root else b"", np.uint8)
        (size,) = self.broadcast(np.array([data.size], np.int64), root, name)
        data = self.broadcast(data if is_root else np.zeros(int(size), np.uint8), root, name)
        return value if is_root else open_sealed(data.tobytes(), self._key)

    def members(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks of a subgroup in order, if they can be one.

        Raises:
            ConfigError: for none, for one that is there twice, or one that is no member.
        """
        wanted = sorted(ranks)
        if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= {*range(self.size)}:
            raise ConfigError(
                f"ranks={list(ranks)}: name some of the ranks 0 to {self.size - 1}, each once"
            )
        return wanted


class SingleMemberGroup(Group):
    """The only member; needs no framework.

    Args:
        rank: in the world.
    """

    transport = "alone"

    def __init__(self, rank: int = 0) -> None:
        super().__init__(0, (rank,), b"", 0.0)

    def all_reduce(
        self, arrays: Sequence[Array], op: Op = Op.AVERAGE, name: str | None = None
    ) -> list[Array]:
        """Return copies of the arrays."""
        return [np.array(array) for array in arrays]

    def all_gather(self, array: Array, name: str | None = None) -> Array:
        """Return a copy of the array, a scalar as one row."""
        return np.atleast_1d(np.array(array))

    def broadcast(self, array: Array, root: int, name: str | None = None) -> Array:
        """Return a copy of the array."""
        return np.array(array)

    def all_to_all(
        self, array: Array, splits: Sequence[int] | Array | None = None, name: str | None = None
    ) -> tuple[Array, Array]:
        """Return a copy of the array, and the number of its rows."""
        rows = np.atleast_1d(np.array(array))
        return rows, np.array(even_splits(len(rows), 1, splits), np.int32)

    def reduce_scatter(self, array: Array, op: Op = Op.AVERAGE, name: str | None = None) -> Array:
        """Return a copy of the array."""
        return np.atleast_1d(np.array(array))

    def barrier(self) -> None:
        """Return at once."""

    def join(self) -> int:
        """Return this member's rank, 0."""
        return 0

    def _subgroup(self, rank: int, ranks: Sequence[int], number: int) -> Group:
        return SingleMemberGroup(self.ranks[0])

    def all_gather_object(self, value: Any, name: str | None = None) -> list[Any]:
        """Return a list of the value itself."""
        return [value]

    def broadcast_object(self, value: Any, root: int = 0, name: str | None = None) -> Any:
        """Return the value itself."""
        return value


def connect(
    rank: int,
    size: int,
    all_gather: Callable[[Any], list[Any]],
    host: str,
    timeout_s: float,
    transport: str | None = None,
) -> Group:
    """Connect the members of a world; all of them call this.

    Args:
        all_gather: returns the plain values that the members have called it with, by rank; called
            twice, over connections that outsiders cannot read.
        host: under which the other members reach this one.
        timeout_s: of the connecting, and of each operation.
        transport: `gloo` or `tensorflow`; by default the best that all members have installed.

    Raises:
        FrameworkMissingError: if the members have no transport in common.
        CollectiveError: if they do not reach each other.
    """
    if size == 1:
        return SingleMemberGroup(rank)
    note_exchange()
    wanted = list(TRANSPORTS) if transport is None else [transport]
    installed = [name for name in wanted if name in TRANSPORTS and find_spec(TRANSPORTS[name])]
    key = secrets.token_bytes(32)
    hello = all_gather({"transports": installed, "key": key})
    common = [name for name in wanted if all(name in each["transports"] for each in hello)]
    if not common:
        raise FrameworkMissingError(
            f"the {size} nodes have no way of reducing in common: they have "
            f"{[each['transports'] for each in hello]}, by rank. Install PyTorch on all of them: "
            "pip install torch"
        )
    module = import_module(f"sparkdl.collectives.{common[0]}")
    offer = module.Offer(rank, size, host, timeout_s)
    try:
        addresses = all_gather(offer.address)
        group: Group = offer.connect(addresses, hello[0]["key"])
    except BaseException:
        offer.withdraw()
        raise
    return group


def shares(rows: int, size: int) -> list[int]:
    """Return how many of the rows each member gets; the first ones get one more."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def even_splits(rows: int, size: int, splits: Sequence[int] | Array | None) -> list[int]:
    """Return how many rows each member is sent.

    Raises:
        ConfigError: if they do not make up the rows, or there is not one for each member.
    """
    if splits is None or len(splits) == 0:
        if rows % size:
            raise ConfigError(
                f"{rows} rows cannot be shared out evenly among {size} members: give splits"
            )
        return [rows // size] * size
    counts = [int(count) for count in splits]
    if len(counts) != size or sum(counts) != rows or min(counts) < 0:
        raise ConfigError(
            f"splits={counts}: there must be one for each of {size} members, 0 or more, and "
            f"{rows} in all"
        )
    return counts


# What members send each other crosses plain connections of the transport. So pickled objects carry
# an HMAC (RFC 2104, SHA-256) whose key came over the driver's authenticated connections, and
# nothing without it is unpickled.


def sealed(value: Any, key: bytes) -> bytes:
    """Return the seal and the pickled value."""
    data: bytes = cloudpickle.dumps(value)
    return hmac.digest(key, data, "sha256") + data


def open_sealed(data: bytes, key: bytes) -> Any:
    """Return the value.

    Raises:
        CollectiveError: if it was sealed with another key.
    """
    seal, body = data[:_SEAL_NBYTES], data[_SEAL_NBYTES:]
    if not hmac.compare_digest(seal, hmac.digest(key, body, "sha256")):
        raise CollectiveError(
            "an object came that no member of this group has sent: its seal is not the group's. "
            "Somebody else talks on the ports of this training"
        )
    return cloudpickle.loads(body)
