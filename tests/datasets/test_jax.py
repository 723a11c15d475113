"""A feed as arrays of JAX, on one device, several, or those of several nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.datasets.jax import GlobalRows, JaxBatches
from sparkdl.feed.reader.batches import EpochBatches
from sparkdl.node.context import NodeContext
from tests.doubles.feeds import Arrivals, vectors
from tests.doubles.nodes import launch

pytestmark = pytest.mark.jax


def batches(it: Arrivals, batch_size: int = 4) -> EpochBatches:
    return EpochBatches(it.reader, batch_size)


def one_epoch(it: Arrivals, **columns: Any) -> None:
    it.batch(pa.record_batch(columns))
    it.end_epoch(0)


def test_elements_are_arrays_on_the_device() -> None:
    import jax

    with Arrivals() as it:
        one_epoch(it, x=np.arange(6) / 1, y=np.arange(6, dtype=np.int8))
        first, second = JaxBatches(batches(it), "x", "y")
    assert all(isinstance(part, jax.Array) for part in first)
    assert [part.dtype for part in first] == [np.float32, np.int8]  # no 64 bits by default
    assert first[0].tolist() == [0, 1, 2, 3]
    assert second[1].tolist() == [4, 5]


def test_sparse_vectors_stay_sparse_and_batches_share_a_few_shapes() -> None:
    with Arrivals() as it:
        it.batch(vectors(0, 9, 4))
        it.end_epoch(0)
        batches = EpochBatches(it.reader, 3, sparse=("x",))
        found = list(JaxBatches(batches, "x", "y"))
        with pytest.raises(ConfigError, match=r"sparse=\['x'\]: cannot be used in Keras on JAX"):
            JaxBatches(batches).as_keras()
    assert [x.todense().tolist() for x, _ in found][2] == [[6, 0, 0, 1], [7, 0, 0, 1], [8, 0, 0, 1]]
    assert {x.nse for x, _ in found} == {8}
    assert (found[0][0].T @ found[0][1]).tolist() == [5, 0, 0, 3]


@pytest.mark.parametrize("column", [["a", "b"], [[1], [1, 2]], [["a"], ["b"]]])
def test_column_that_is_no_array_is_refused_by_name(column: Any) -> None:
    with Arrivals() as it:
        one_epoch(it, c=column)
        with pytest.raises(FeedTypeError, match=r"column 'c' holds .*, which JAX has no tensor"):
            list(JaxBatches(batches(it)))


def test_times_that_32_bits_do_not_hold_are_refused() -> None:
    with Arrivals() as it:
        one_epoch(it, c=pa.array([2**40], pa.timestamp("us")))
        with pytest.raises(
            FeedTypeError, match=r"column 'c': microseconds take 64 bits: set jax_enable_x64"
        ):
            list(JaxBatches(batches(it)))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_ahead_are_given_back_when_the_loop_is_left(prefetch: int) -> None:
    with Arrivals() as it:
        it.rows(40)
        it.end_epoch(0)
        data = JaxBatches(batches(it), "x", prefetch=prefetch)
        assert next(iter(data)).tolist() == [0, 1, 2, 3]
        assert it.consumed == (4 + 4 * prefetch, 0)
        assert [v for batch in data for v in batch.tolist()] == list(range(40))
    with pytest.raises(ConfigError, match="prefetch=-1"):
        JaxBatches(batches(it), prefetch=-1)


def test_arrays_outlive_the_segments_that_they_came_from() -> None:
    with Arrivals() as it:
        it.rows(4, 4)
        it.end_epoch(0)
        data = list(JaxBatches(batches(it), "x"))
        assert it.released == 2
    assert [batch.tolist() for batch in data] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_sharding_of_one_process_keeps_the_shape() -> None:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec as P

    sharding = NamedSharding(jax.make_mesh((1,), ("data",)), P("data"))
    with Arrivals() as it:
        one_epoch(it, x=np.arange(8.0).reshape(4, 2).tolist(), y=np.arange(4))
        ((x, y),) = JaxBatches(batches(it), "x", "y", sharding)
    assert (x.shape, y.shape) == ((4, 2), (4,))
    assert x.sharding == y.sharding == sharding


@dataclass(frozen=True)
class Device:
    process_index: int


@dataclass(frozen=True)
class Held:
    """A sharding: which process has a device with which part of the rows."""

    parts: tuple[tuple[int, int], ...]

    @property
    def device_set(self) -> set[int]:
        return set(range(len(self.parts)))

    def devices_indices_map(self, shape: tuple[int, ...]) -> Any:
        class Pairs(list[Any]):
            items = list[Any].copy

        return Pairs((Device(p), (slice(part, part + 1),)) for p, part in self.parts)


@pytest.mark.parametrize(
    ("parts", "members"),
    [
        (((0, 0), (1, 1)), 1),
        (((0, 0), (1, 0), (2, 1), (3, 1)), 2),
        (((0, 0), (0, 1), (1, 0), (1, 1)), 2),
        (((0, 0), (0, 0), (1, 1), (1, 1)), 1),
    ],
)
def test_processes_that_hold_the_same_rows_are_found(parts: Any, members: int) -> None:
    sharding: Any = Held(parts)
    found = GlobalRows.of(sharding)
    assert found.members == members
    assert found.processes == len({process for process, _ in parts})


@pytest.mark.parametrize(
    "parts",
    [
        ((0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 0)),
        ((0, 0), (0, 1), (1, 2)),
        ((0, 0), (1, 0), (2, 1)),
        ((1, 0), (2, 1)),
    ],
)
def test_rows_that_overlap_are_refused(parts: Any) -> None:
    sharding: Any = Held(parts)
    with pytest.raises(ConfigError, match="hold overlapping rows, or unequal numbers of them"):
        GlobalRows.of(sharding)


def add_up(args: None, ctx: NodeContext) -> list[float]:
    """Add up all rows of an epoch by steps over global arrays; say what a wrong sharding raises."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    assert mesh.size == 2 * ctx.num_workers
    sharding = NamedSharding(mesh, P("data"))
    assert "must be a multiple of a node's devices" in error_of(sharding, 7, 7)
    assert "Use tail='pad'" in error_of(sharding, batch_size=9)
    assert "Give a number instead of None" in error_of(sharding, pad={"x": None})
    with pytest.raises(ConfigError, match="batch_size=9 cannot be divided among the 2 nodes"):
        ctx.jax_batches(9, sharding=NamedSharding(mesh, P()))

    def step(total: Any, value: Any, weight: Any) -> Any:
        return total + jnp.sum(value * weight)

    compiled = jax.jit(step)
    steps, total = 0, jnp.float32(0)
    for value, weight in ctx.jax_batches(8, "value", sharding=sharding):
        assert value.shape == weight.shape == (8 * ctx.num_workers,)
        total = compiled(total, value, weight)
        steps += 1
    return [float(total), steps]


def error_of(sharding: Any, batch_size: int = 8, rows: int = 8, pad: Any = None) -> str:
    """Return why the first batch cannot be sharded."""
    batches: Any = FirstBatch(batch_size, {"x": np.zeros(rows, np.float32)}, pad or {})
    try:
        next(iter(JaxBatches(batches, sharding=sharding)))
    except ConfigError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class FirstBatch:
    batch_size: int
    columns: dict[str, Any]
    pad: dict[str, int | None]
    sparse: tuple[str, ...] = ()

    def ahead(self) -> Iterator[dict[str, Any]]:
        yield self.columns


@pytest.mark.smoke
def test_nodes_that_share_global_arrays_equal_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    with launch(add_up, framework="jax") as cluster:
        cluster.feed(range(101))
        first, second = cluster.results(60)
    assert first == second
    assert first[0] == sum(range(101))
    assert first[1] >= 7
