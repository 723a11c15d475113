"""What two nodes do with `sparkdl.horovod.tensorflow`; the tests compare it with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkdl.core.errors import RemovedError, SparkdlError
from sparkdl.node.context import NodeContext

DTYPES = ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
OPS = ("Average", "Sum", "Min", "Max", "Product")
KINDS = [(dtype, op) for dtype in DTYPES for op in OPS if dtype == "float32" or op in OPS[:2]]
"""What is reduced: by `Min`, `Max` and `Product` of one type, as none of them divides."""
MANY = 24


def everything(args: Any, ctx: NodeContext) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    return {case.__name__: case() for case in CASES} | {"joins": joins()}


def begin() -> Any:
    import sparkdl.horovod.tensorflow as hvd

    hvd.init()
    return hvd


def reduces_all_types() -> dict[str, Any]:
    import tensorflow as tf

    hvd, found = begin(), {}
    tensors = {t: tf.cast([[hvd.rank() + 1, 2, 3], [4, 5, 6]], t) for t in DTYPES}

    def all_ways() -> list[Any]:
        return [hvd.allreduce(tensors[t], op=getattr(hvd, op)) for t, op in KINDS]

    for (dtype, op), *both in zip(KINDS, all_ways(), tf.function(all_ways)(), strict=True):
        assert [tensor.dtype for tensor in both] == [dtype] * 2
        found[f"{dtype} {op}"] = [_float(tensor) for tensor in both]
    return found


def moves_rows() -> dict[str, Any]:
    import tensorflow as tf

    hvd = begin()
    rank = hvd.rank()
    rows = tf.range(6.0)[:, tf.newaxis] + 10.0 * rank

    def all_ways(rows: Any) -> list[Any]:
        uneven, got = hvd.alltoall(rows, [1 + rank, 5 - rank])
        return [
            *(hvd.allgather(rows[: rank + 1]), hvd.broadcast(rows, 1), hvd.alltoall(rows)),
            *(uneven, got, hvd.reducescatter(rows[:5], op=hvd.Sum)),
            *(hvd.allgather(tf.constant([rank == 0])), hvd.allreduce(rows, op=hvd.Sum)),
        ]

    any_rows = [tf.TensorSpec([None, 1])]
    graph = tf.function(all_ways, input_signature=any_rows)(rows)
    names = ("allgather", "broadcast", "alltoall", "uneven", "got", "scatter", "bools", "sum")
    pairs = zip(names, all_ways(rows), graph, strict=True)
    return {name: [eager.numpy(), value.numpy()] for name, eager, value in pairs}


def scales() -> dict[str, Any]:
    import tensorflow as tf

    hvd = begin()
    ones, whole = tf.ones([2]), tf.constant([7, 7])
    scaled = hvd.allreduce(ones, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    odd = hvd.allreduce(whole * (hvd.rank() + 1), average=True, postscale_factor=0.5)
    small = hvd.allreduce(ones / 3, compression=hvd.Compression.fp16)
    return {"float": scaled.numpy(), "int": odd.numpy(), "fp16": small.numpy()}


def keeps_the_order_of_the_program_in_graphs() -> Any:
    """Reduce many tensors that are ready in another order on each member."""
    import tensorflow as tf

    hvd = begin()
    rank = hvd.rank()

    @tf.function  # type: ignore[untyped-decorator]
    def inner(value: Any) -> Any:
        return hvd.allreduce(value, op=hvd.Sum)

    @tf.function  # type: ignore[untyped-decorator]
    def step(heavy: Any) -> Any:
        found = []
        for number in range(MANY):
            is_slow = number % 2 == rank
            work = tf.reduce_sum(tf.linalg.matmul(heavy, heavy)) * 0.0 if is_slow else 0.0
            value = tf.fill([3], number * 10.0 + rank) + work
            found.append(inner(value) if number % 3 == 0 else hvd.allreduce(value, op=hvd.Sum))
        total = tf.constant(0.0)
        for number in tf.range(4):
            total += hvd.allreduce(tf.cast(number, tf.float32), op=hvd.Sum)
        if total > 1.0:
            total = hvd.allreduce(total, op=hvd.Max)
        return tf.stack(found)[:, 0], total

    heavy = tf.ones([200, 200])
    return [[value.numpy() for value in step(heavy)] for _ in range(3)]


def exchanges_at_later_traces() -> list[Any]:
    """Trace functions without an exchange first, then with one."""
    import tensorflow as tf

    from sparkdl.horovod.tensorflow import exchange

    hvd = begin()
    rank = hvd.rank()
    exchange._turn.cache_clear()  # as in a process that has exchanged nothing
    own = [hvd.add_process_set([0]), hvd.add_process_set([1])]
    variable = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(
        tf.keras.optimizers.SGD(1.0), op=hvd.Sum, backward_passes_per_step=2
    )
    optimizer.build([variable])

    @tf.function  # type: ignore[untyped-decorator]
    def inner(x: Any, moves: bool) -> Any:
        if moves:
            x = hvd.allreduce(x, op=hvd.Sum) + hvd.allreduce(x, process_set=own[rank])
        return x

    @tf.function  # type: ignore[untyped-decorator]
    def outer(x: Any, moves: bool) -> Any:
        if moves:
            optimizer.apply_gradients([(x, variable)])
        return inner(inner(x, False), moves)

    x = tf.constant([rank + 1.0])
    found = [outer(x, moves).numpy().item() for moves in (False, True, True)]
    for process_set in own:
        hvd.remove_process_set(process_set)
    return [*found, variable.numpy().item()]


def differentiates() -> dict[str, Any]:
    import tensorflow as tf

    hvd = begin()
    rank = hvd.rank()
    x = tf.Variable(tf.range(1.0, 5.0))
    weights = tf.range(1.0, 5.0) * (rank + 1)

    def gradient(function: Any, count: int = 4) -> Any:
        @tf.function  # type: ignore[untyped-decorator]
        def of_x() -> Any:
            with tf.GradientTape() as tape:
                result = function(x)
                loss = tf.reduce_sum(result * (tf.range(1.0, count + 1.0) * (rank + 1)))
            return tf.convert_to_tensor(tape.gradient(loss, x))

        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function(x) * (tf.range(1.0, count + 1.0) * (rank + 1)))
        eager = tf.convert_to_tensor(tape.gradient(loss, x))
        np.testing.assert_allclose(eager, of_x())
        return eager.numpy()

    found = {
        "sum": gradient(lambda x: hvd.allreduce(x, op=hvd.Sum)),
        "average": gradient(lambda x: hvd.allreduce(x, prescale_factor=2.0)),
        "allgather": gradient(lambda x: hvd.allgather(x[: rank + 1]), 3),
        "broadcast": gradient(lambda x: hvd.broadcast(x, 1)),
        "alltoall": gradient(lambda x: hvd.alltoall(x, [1, 3])[0], 2 if rank == 0 else 6),
        "reducescatter": gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), 2),
    }
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(x * weights)
    tape = hvd.DistributedGradientTape(tape, groups=[[x], [x]])  # accepted
    found["tape"] = tape.gradient(loss, [x])[0].numpy()
    with tf.GradientTape(persistent=True) as tape:
        first, second = tf.reduce_sum(x * weights), tf.reduce_sum(x * x)
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, compression=hvd.Compression.fp16)
    found["dict"] = tape.gradient(first, {"x": x})["x"].numpy()
    found["twice"] = tape.gradient(second, x).numpy()
    return found


def averages_sparse_gradients() -> dict[str, Any]:
    import tensorflow as tf

    hvd = begin()
    table = tf.Variable(tf.ones([5, 2]))
    ids = tf.constant([0, 2] if hvd.rank() == 0 else [2, 4, 4])
    found = {}
    for is_dense in (False, True):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, ids))
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=is_dense)
        (gradient,) = tape.gradient(loss, [table])
        assert isinstance(gradient, tf.IndexedSlices) is not is_dense
        found[f"dense={is_dense}"] = tf.convert_to_tensor(gradient).numpy()[:, 0]
    return found


def averages_slices_of_whole_numbers() -> dict[str, Any]:
    import tensorflow as tf

    hvd = begin()
    found: dict[str, list[Any]] = {}
    for dtype in ("uint8", "int8", "int32", "int64"):
        rows, indices = tf.cast([[1], [1]], dtype), tf.constant([hvd.rank(), 2])
        slices = tf.IndexedSlices(rows, indices, tf.constant([3, 1]))
        (grouped,) = hvd.grouped_allreduce([slices])
        for averaged in (grouped, hvd.allreduce(slices, average=True)):
            dense = tf.convert_to_tensor(averaged)
            found.setdefault(dtype, []).append((dense.dtype.name, dense.numpy()[:, 0].tolist()))
    return found


def sends_objects_and_variables() -> dict[str, Any]:
    import tensorflow as tf

    hvd = begin()
    rank = hvd.rank()
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(2)])
    variables = [*model.variables, tf.Variable(rank), tf.Variable([True, rank == 0])]
    hvd.broadcast_variables(variables, root_rank=1)
    graph = tf.Variable([float(rank)])

    @tf.function  # type: ignore[untyped-decorator]
    def send() -> None:
        hvd.broadcast_variables([graph], root_rank=1)

    send()
    return {
        "objects": [list(pair) for pair in hvd.allgather_object((rank, "x" * (rank + 1)))],
        "object": hvd.broadcast_object({"from": rank}, root_rank=1),
        "weights": np.concatenate([w.ravel() for w in model.get_weights()]),
        "others": [variables[-2].numpy(), variables[-1].numpy(), graph.numpy()],
    }


def trains_in_a_loop_of_its_own() -> Any:
    """Horovod's pattern for TensorFlow 2: a tape, and a broadcast after the first batch."""
    import tensorflow as tf

    hvd = begin()
    tf.keras.utils.set_random_seed(hvd.rank())
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3)])
    optimizer = tf.keras.optimizers.Adam(0.01 * hvd.size())
    x = tf.random.normal([8, 4])

    @tf.function  # type: ignore[untyped-decorator]
    def training_step(x: Any, first_batch: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss

    losses = [float(training_step(x, batch == 0)) for batch in range(6)]
    assert losses[-1] < losses[0]
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def refuses() -> dict[str, Any]:
    """Ask for what cannot be, alike on all members; then see that they still work together."""
    import tensorflow as tf

    hvd = begin()
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
    one = tf.constant(1.0)
    x = tf.Variable([1.0])

    def maximum() -> Any:
        with tf.GradientTape() as tape:
            loss = hvd.allreduce(x, op=hvd.Max)
        return tape.gradient(loss, x)

    asked = {
        "text": lambda: hvd.allreduce(tf.constant(["a"])),
        "slices": lambda: hvd.allreduce(slices, op=hvd.Max),
        "slices with a factor": lambda: hvd.allreduce(slices, prescale_factor=2.0),
        "gradient of max": maximum,
        "predivide": lambda: hvd.DistributedGradientTape(
            tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0
        ),
        "old optimizer": lambda: hvd.DistributedOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(0.1)
        ),
        "no optimizer": lambda: hvd.DistributedOptimizer("adam"),
        "barrier in a graph": tf.function(hvd.barrier, autograph=False),
    }
    other = tf.Variable(tf.ones([2 + hvd.rank()]))
    in_graph = tf.function(lambda: hvd.allreduce(other))
    asked["other variables"] = lambda: hvd.broadcast_variables([other], root_rank=0)
    asked["other shapes in a graph"] = in_graph
    found: dict[str, Any] = {}
    for name, call in asked.items():
        try:
            call()
            found[name] = "nothing"
        except (SparkdlError, tf.errors.UnknownError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    found["after"] = float(hvd.allreduce(one, op=hvd.Sum))
    assert issubclass(RemovedError, NotImplementedError)
    return found


def raises_tensorflows_errors() -> dict[str, Any]:
    """Return which of TensorFlow's errors each wrong call raised, which was ours as well."""
    import pickle

    import pytest
    import tensorflow as tf

    hvd = begin()
    rank = hvd.rank()
    x = tf.Variable(tf.ones([2 + rank]))

    def backward() -> Any:
        with tf.GradientTape() as tape:
            rows = hvd.allgather(x)
        return tape.gradient(rows, x, tf.ones([5 + rank]))

    asked = {
        "splits": lambda: hvd.alltoall(tf.ones([3]), [1, 1]),
        "uneven": lambda: hvd.alltoall(tf.ones([3])),
        "scalar": lambda: hvd.reducescatter(tf.constant(1.0)),
        "scalar in a graph": tf.function(lambda: hvd.allgather(tf.constant(1.0))),
    }
    asked |= {
        "shapes": lambda: hvd.allreduce(x),
        "types": lambda: hvd.broadcast(tf.ones([2], tf.int32 if rank else tf.float32), 0),
        "same bytes": lambda: hvd.broadcast(tf.ones([2, 3] if rank else [3, 2]), 0),
        "roots": lambda: hvd.broadcast(tf.ones([2]), rank),
        "gradient": backward,
    }
    found: dict[str, Any] = {}
    for name, call in asked.items():
        with pytest.raises(SparkdlError) as info:
            call()
        error = info.value
        again = pickle.loads(pickle.dumps(error))  # noqa: TID251 (its own)
        assert (str(again), type(again)) == (str(error), type(error))
        assert isinstance(error, hvd.HorovodInternalError) != isinstance(error, ValueError)
        kinds = (tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError)
        found[name] = [kind.__name__ for kind in kinds if isinstance(error, kind)]
    return found


def joins() -> list[Any]:
    import tensorflow as tf

    hvd = begin()
    found = [float(hvd.allreduce(tf.constant(3.0), op=hvd.Sum)) for _ in range(1 + hvd.rank())]
    last = hvd.join()
    hvd.barrier()
    return [found, last]


def _float(tensor: Any) -> Any:
    import tensorflow as tf

    return tf.cast(tensor, tf.float64).numpy()


CASES = (
    *(exchanges_at_later_traces, reduces_all_types, moves_rows, scales, differentiates),
    *(keeps_the_order_of_the_program_in_graphs, averages_sparse_gradients),
    *(averages_slices_of_whole_numbers, sends_objects_and_variables, trains_in_a_loop_of_its_own),
    *(refuses, raises_tensorflows_errors),
)
