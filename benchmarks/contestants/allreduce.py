"""Sums float32 arrays of several sizes over the nodes of a local cluster, in one of several ways.

Every way runs in children of sparkdl, one thread each, so that what differs is the collective.
Bare gloo takes turns with it in the same processes: whatever else the machine does, it does to
both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from harness import claim_stdout, write

MIN_ITERATIONS = 5
MAX_ITERATIONS = 200
SECONDS = 1.0
"""About as long is each size measured; all ranks do the same number of iterations."""
BLOCKS = 5
"""Of iterations by one way and then by bare gloo."""
GROUP_KEY = 77


def gloo(ctx: Any, elements: int) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    """torch.distributed alone."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        torch.set_num_threads(1)
        store = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)  # of rank 0
        port = ctx.all_gather(store.port)[0]
        if ctx.rank:
            store = dist.TCPStore("localhost", port, None, False, wait_for_workers=False)
        place = {"rank": ctx.rank, "world_size": ctx.num_workers}
        dist.init_process_group("gloo", store=store, **place)
    tensor = torch.ones(elements)
    return lambda: dist.all_reduce(tensor), lambda _: 0.0


def ring(ctx: Any, elements: int) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    """TensorFlow's collectives alone."""
    import tensorflow as tf

    if not hasattr(ring, "strategy"):
        ring.strategy = tf.distribute.MultiWorkerMirroredStrategy()  # type: ignore[attr-defined]
    values = tf.ones(elements)

    @tf.function
    def reduce(values: Any) -> Any:
        return tf.raw_ops.CollectiveReduceV2(
            input=values,
            group_size=ctx.num_workers,
            group_key=GROUP_KEY,
            instance_key=elements,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            communication_hint="ring",
        )

    return lambda: reduce(values), lambda sums: float(sums[0])  # no copy, as `.numpy()` is


def group(ctx: Any, elements: int) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    """sparkdl's group, in place."""
    import torch

    import sparkdl.horovod.torch as hvd
    from sparkdl.collectives.transport import Op, Reduction
    from sparkdl.horovod.common.process_sets import group_of

    torch.set_num_threads(1)
    hvd.init()
    members, tensor = group_of(hvd.global_process_set), torch.ones(elements)
    return lambda: members.all_reduce_(tensor, Reduction(Op.SUM)), lambda _: 0.0


def hvd_torch(ctx: Any, elements: int) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    """sparkdl.horovod.torch, in place."""
    import torch

    import sparkdl.horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    tensor = torch.ones(elements)
    return lambda: hvd.allreduce_(tensor, op=hvd.Sum), lambda _: 0.0


def hvd_tensorflow(ctx: Any, elements: int) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    """sparkdl.horovod.tensorflow, in a `tf.function`."""
    import tensorflow as tf

    import sparkdl.horovod.tensorflow as hvd

    hvd.init()
    values = tf.ones(elements)

    @tf.function
    def reduce(values: Any) -> Any:
        return hvd.allreduce(values, op=hvd.Sum)

    return lambda: reduce(values), lambda sums: float(sums[0])  # no copy, as `.numpy()` is


WAYS = {
    "gloo": ("torch", gloo),
    "ring": ("tensorflow", ring),
    "group": ("plain", group),
    "torch": ("torch", hvd_torch),
    "tensorflow": ("tensorflow", hvd_tensorflow),
}


def measure(args: argparse.Namespace, ctx: Any) -> list[dict[str, float]]:
    """Be the user's function: return for each size the median of its iterations, in seconds."""
    if WAYS[args.way][0] == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
    found = []
    for nbytes in args.sizes:
        elements = max(1, nbytes // 4)
        reduce, first = WAYS[args.way][1](ctx, elements)
        bare, _ = gloo(ctx, elements)
        start = time.perf_counter()
        value = first(reduce())
        if value not in (0.0, ctx.num_workers):
            raise ValueError(f"a sum of ones over {ctx.num_workers} ranks is {value}")
        reduce()
        once_s = max(ctx.all_gather((time.perf_counter() - start) / 2))
        iterations = int(min(MAX_ITERATIONS, max(MIN_ITERATIONS, SECONDS / once_s)))
        times: dict[str, list[float]] = {"seconds": [], "bare_seconds": []}
        for _ in range(BLOCKS):
            for name, work in (("seconds", reduce), ("bare_seconds", bare)):
                work()  # waits for whom the other way has kept longest
                for _ in range(-(-iterations // BLOCKS)):
                    start = time.perf_counter()
                    work()
                    times[name].append(time.perf_counter() - start)
        ctx.barrier()
        found.append({"nbytes": nbytes} | {k: statistics.median(v) for k, v in times.items()})
    return found


def main() -> None:
    """Launch the nodes, and write a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="bytes")
    parsed = parser.parse_args()
    lines = claim_stdout()
    import sparkdl

    results = sparkdl.run(
        None,
        measure,
        parsed,
        nodes=parsed.ranks,
        framework=WAYS[parsed.way][0],
        executor="local",
        timeout_s=300,
    )
    for of_size in zip(*results, strict=True):
        write(lines, {"event": "size"} | {k: max(one[k] for one in of_size) for k in of_size[0]})


if __name__ == "__main__":
    main()
