"""Work in order; objects between members, sealed; what goes on after a `join`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.collectives.group import Group, SerialExecutor, connect, open_sealed, sealed
from sparkdl.collectives.transport import Op, Reduction, Transport
from sparkdl.core.errors import CollectiveError, ConfigError, FrameworkMissingError

if TYPE_CHECKING:
    import torch

SOON_S = 10.0


def test_work_is_done_in_the_order_in_which_it_was_given() -> None:
    gate, done = threading.Event(), list[object]()

    class Opening(SerialExecutor):
        def submit(self, work: Callable[[], Any], name: str | None = None) -> Future[Any]:
            future = super().submit(work, name)
            if name == "third":
                gate.set()
            return future

    queue = Opening("test")
    queue.run(lambda: done.append(threading.current_thread().name))
    first = queue.submit(lambda: done.append("first" if gate.wait(SOON_S) else "late"))
    second = queue.submit(lambda: done.append("second"))
    queue.run(lambda: done.append("third"), "third")
    assert done == [threading.current_thread().name, "first", "second", "third"]
    assert first.done()
    assert second.done()
    queue.close()


def test_error_is_the_waiters_and_what_comes_after_is_done() -> None:
    queue = SerialExecutor("test")
    broken = queue.submit(lambda: 1 / 0)
    assert queue.submit(lambda: 7).result(SOON_S) == 7
    with pytest.raises(ZeroDivisionError):
        broken.result(SOON_S)
    with pytest.raises(ZeroDivisionError):
        queue.run(lambda: 1 / 0)
    assert queue.run(lambda: 8) == 8
    queue.close()
    assert queue.submit(lambda: 9).result(SOON_S) == 9, "closed, it begins anew"
    queue.close()


def test_work_may_run_more_work_at_once() -> None:
    queue = SerialExecutor("test")
    assert queue.run(lambda: queue.run(lambda: 7)) == 7
    assert queue.submit(lambda: queue.run(lambda: 8)).result(SOON_S) == 8
    queue.close()


def test_members_without_pytorch_are_named() -> None:
    def all_gather(mine: Any) -> list[Any]:
        return [{**mine, "torch": False}, mine]

    with pytest.raises(FrameworkMissingError, match=r"1 of 2 nodes have no PyTorch \(ranks \[0\]"):
        connect(1, 2, all_gather, "localhost", 1.0)


def test_name_can_be_given_again_when_its_work_is_done() -> None:
    queue, gate = SerialExecutor("test"), threading.Event()
    first = queue.submit(lambda: gate.wait(SOON_S), "a name")
    with pytest.raises(ConfigError, match="a name is under way already"):
        queue.submit(lambda: None, "a name")
    with pytest.raises(ConfigError, match="a name is under way already"):
        queue.run(lambda: None, "a name")
    others = [queue.submit(lambda: 1, "another"), queue.submit(lambda: 2), queue.submit(lambda: 3)]
    gate.set()
    assert first.result(SOON_S)
    assert queue.submit(lambda: 4, "a name").result(SOON_S) == 4
    assert [other.result(SOON_S) for other in others] == [1, 2, 3]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            queue.run(lambda: 1 / 0, "a name")
        with pytest.raises(ZeroDivisionError):
            queue.submit(lambda: 1 / 0, "a name").result(SOON_S)
    queue.close()


def test_object_comes_as_it_was() -> None:
    value = {"f": lambda x: x + 1, "n": [1, 2]}
    opened = open_sealed(sealed(value, b"key"), b"key")
    assert opened["n"] == [1, 2]
    assert opened["f"](1) == 2


class Dangerous:
    def __reduce__(self) -> tuple[object, ...]:
        return pytest.fail, ("it was unpickled",)


@pytest.mark.parametrize("where", [0, 31, 32, -1])
def test_nothing_is_unpickled_that_was_not_sealed_by_a_member(where: int) -> None:
    data = bytearray(sealed(Dangerous(), b"key"))
    with pytest.raises(CollectiveError, match="without this group's signature"):
        open_sealed(bytes(data), b"another key")
    data[where] ^= 1
    with pytest.raises(CollectiveError, match="without this group's signature"):
        open_sealed(bytes(data), b"key")
    with pytest.raises(CollectiveError, match="without this group's signature"):
        open_sealed(b"", b"key")


@contextmanager
def members(size: int, timeout_s: float) -> Iterator[list[Transport]]:
    from torch.distributed import HashStore

    store = HashStore()
    with ThreadPoolExecutor(size) as pool:
        wires = pool.map(
            lambda rank: Transport(rank, size, store, "localhost", timeout_s), range(size)
        )
        found = list(wires)
        yield found
        for wire in found:
            wire.close()


def told(wire: Transport) -> str:
    with pytest.raises(CollectiveError) as info, wire.named_errors("barrier"):
        wire.announce(b"x")
    return str(info.value)


@pytest.mark.smoke
@pytest.mark.torch
def test_all_learn_at_once_that_a_member_has_gone() -> None:
    with members(5, 60.0) as wires, ThreadPoolExecutor(5) as pool:
        wires[2].close()
        began_s = time.monotonic()
        texts = list(pool.map(told, wires))
    assert time.monotonic() - began_s < SOON_S
    assert "it was closed" in texts.pop(2)
    assert all("by peer" in text for text in texts), texts


@pytest.mark.torch
def test_waiting_for_a_member_ends_in_time() -> None:
    with members(3, 1.0) as wires, ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(told, wires[:2]))
    assert any("not all called this within 1 s" in text for text in texts), texts


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "bool", "float16"])
def test_numbers_of_each_kind_are_reduced_and_whole_ones_exactly(dtype: str) -> None:
    import torch

    kind = getattr(torch, dtype)
    with members(2, SOON_S) as wires, ThreadPoolExecutor(2) as pool:

        def mean(wire: Transport) -> torch.Tensor:
            group = Group(wire.rank, range(2), wire)
            large = 2**60 + 1 if dtype == "int64" else 1
            values = torch.tensor([wire.rank, -3 * wire.rank, large]).to(kind)
            return group.all_reduce_(values, Reduction(Op.SUM))

        for found in pool.map(mean, wires):
            assert found.dtype is kind
            expected = {"int64": [1, -3, 2**61 + 2], "uint8": [1, 253, 2], "bool": [1, 1, 1]}
            assert found.tolist() == expected.get(dtype, [1, -3, 2])
