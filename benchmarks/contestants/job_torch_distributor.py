"""pyspark's TorchDistributor: two processes that read the files themselves; a UDF scores."""

from __future__ import annotations

import argparse

from jobs import (
    Phases,
    Told,
    arrays,
    compete,
    options,
    shuffled,
    spark_session,
    torch_loop,
    torch_model,
    udf_accuracy,
)


def train(args: argparse.Namespace) -> None:
    """Be the user's function on a node."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    args.told.mark("entered")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch_model())
    x, y = arrays(args.train, dist.get_rank(), dist.get_world_size())
    torch_loop(model, args.epochs, lambda: shuffled(x, y, args.batch), args.told)
    args.told.mark("trained")
    if dist.get_rank() == 0:
        torch.save(model.module, f"{args.model}.pt")
    dist.destroy_process_group()


def job(parsed: argparse.Namespace, phases: Phases, told: Told) -> float:
    """Be the user's program."""
    from pyspark.ml.torch.distributor import TorchDistributor

    parsed.told = told
    with spark_session(phases, slots=2) as spark:
        TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(train, parsed)
        told.end(phases, parsed.deadline_s)
        phases.end("save")
        share = udf_accuracy(spark.read.parquet(parsed.test), f"{parsed.model}.pt")
        phases.end("score")
    return share


if __name__ == "__main__":
    compete(options(__doc__).parse_args(), job)
