"""sparkdl: two nodes, fed from a DataFrame or reading its files; `TFModel` or `predict` scores."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jobs import (
    Array,
    Phases,
    Told,
    accuracy,
    compete,
    first_batch,
    keras_model,
    options,
    spark_session,
    torch_loop,
    torch_model,
)


def train_keras(args: argparse.Namespace, ctx: Any) -> None:
    """Be the user's function on a node."""
    import keras
    import tensorflow as tf

    args.told.mark("entered")
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras_model(keras)
    data = ctx.dataset(args.batch, x="image", y="label")
    model.fit(data, epochs=args.epochs, verbose=0, callbacks=[first_batch(keras, args.told)])
    args.told.mark("trained")
    if ctx.is_chief:
        model.save(f"{args.model}.keras")


def train_torch(args: argparse.Namespace, ctx: Any) -> None:
    """Be the user's function on a node."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    args.told.mark("entered")
    dist.init_process_group()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch_model())
    data = ctx.torch_dataset(args.batch, x="image", y="label")
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    torch_loop(model, args.epochs, lambda: iter(loader), args.told)
    args.told.mark("trained")
    if ctx.is_chief:
        torch.save(model.module, f"{args.model}.pt")


def score_torch(path: str) -> Callable[[Mapping[str, Array]], Array]:
    """Return what scores rows with a saved model."""
    import torch

    model = torch.load(path, weights_only=False)

    def score(columns: Mapping[str, Array]) -> Array:
        with torch.no_grad():
            scores: Array = model(torch.tensor(columns["image"])).numpy()
        return scores

    return score


def job(parsed: argparse.Namespace, phases: Phases, told: Told) -> float:
    """Be the user's program."""
    import sparkdl
    from sparkdl import predict

    parsed.told = told
    is_keras = parsed.framework == "keras"
    with spark_session(phases, slots=2) as spark:
        with sparkdl.launch(
            spark,
            train_keras if is_keras else train_torch,
            parsed,
            nodes=2,
            framework="tensorflow" if is_keras else "torch",
            show_progress=False,
        ) as cluster:
            is_fed = parsed.source == "dataframe"
            data = spark.read.parquet(parsed.train) if is_fed else f"{parsed.train}/*.parquet"
            cluster.feed(data, epochs=parsed.epochs)
            cluster.results(parsed.deadline_s)
            told.end(phases, parsed.deadline_s)
            phases.end("save")
        phases.end("shutdown")
        test = spark.read.parquet(parsed.test)
        if is_keras:
            model = sparkdl.TFModel().setExportDir(f"{parsed.model}.keras").setBatchSize(1024)
            model.setInputMapping({"image": "image"}).setOutputMapping({"scores": "scores"})
            share = accuracy(model.transform(test))
        else:
            load = partial(score_torch, f"{parsed.model}.pt")
            scored = predict(test, load, ["image"], "scores array<float>", batch_size=1024)
            share = accuracy(scored)
        phases.end("score")
    return share


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--source", choices=["dataframe", "parquet"], default="dataframe")
    compete(parser.parse_args(), job)
