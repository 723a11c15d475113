"""The contestants of `inference.py`: ways to score rows with a dense 784-256-10 network.

The model is loaded and all rows have been scored once before the clock starts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feeding import feed_session
from harness import arguments, claim_stdout, cpu_s, write

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CLASSES = 10
Action = Callable[[], int]


def make_model(folder: Path) -> None:
    """Save the network as a SavedModel and as a `.keras` file, unless they exist."""
    import keras

    if (folder / "model.keras").exists():
        return
    keras.utils.set_random_seed(0)
    layers = keras.layers
    hidden, scores = layers.Dense(256, activation="relu"), layers.Dense(CLASSES)
    model = keras.Sequential([keras.Input((784,), name="image"), hidden, scores])
    model.export(str(folder / "saved_model"), verbose=False)
    model.save(folder / "model.keras")


def scores(scored: DataFrame) -> Action:
    """Return an action that computes all scores and returns their number."""
    from pyspark.sql import functions

    return lambda: int(scored.agg(functions.sum(functions.size("scores"))).first()[0])


def by_sparkdl(data: DataFrame, args: argparse.Namespace) -> Action:
    from sparkdl import TFModel

    model = TFModel().setExportDir(f"{args.model}/saved_model").setBatchSize(args.batch)
    model.setInputMapping({"x": "image"}).setOutputMapping({"output_0": "scores"})
    everything = model.transform(data)
    if args.way != "kept":
        return scores(everything)
    if scores(everything)() != args.rows * CLASSES:
        raise ValueError("not all rows were scored")

    def action() -> int:
        everything.write.format("noop").mode("overwrite").save()
        return args.rows * CLASSES

    return action


def by_udf(data: DataFrame, args: argparse.Namespace) -> Action:
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import ArrayType, FloatType

    path = f"{args.model}/model.keras"

    def make_predict() -> Any:
        import keras

        return keras.saving.load_model(path).predict_on_batch

    predict = predict_batch_udf(
        make_predict,
        return_type=ArrayType(FloatType()),
        batch_size=args.batch,
        input_tensor_shapes=[[784]],
    )
    return scores(data.withColumn("scores", predict("x")))


def by_tfos(data: DataFrame, args: argparse.Namespace) -> Action:
    from tensorflowonspark.pipeline import TFModel

    model = TFModel({"num_gpus": 0}).setExportDir(f"{args.model}/saved_model")
    model.setInputMapping({"x": "image"}).setOutputMapping({"output_0": "scores"})
    model.setSignatureDefKey("serving_default").setTagSet("serve").setBatchSize(args.batch)
    return scores(model.transform(data))


@contextmanager
def limit(args: argparse.Namespace) -> Iterator[Action]:
    """Yield the action of one process that reads the files and predicts."""
    import keras
    import pyarrow.dataset as ds

    model = keras.saving.load_model(f"{args.model}/model.keras")
    files = sorted(map(str, Path(args.path).glob("*.parquet")))

    def action() -> int:
        made = 0
        for batch in ds.dataset(files).to_batches(columns=["x"], batch_size=args.batch):
            x = batch.column("x").flatten().to_numpy().reshape(-1, 784)
            made += model.predict_on_batch(x).size
        return made

    yield action


@contextmanager
def on_spark(args: argparse.Namespace) -> Iterator[Action]:
    """Yield an action of Spark on two executors of one slot."""
    with feed_session(slots=1, partitions=args.files) as spark:
        spark.conf.set("spark.sql.files.maxPartitionBytes", "8g")  # one partition for each file
        yield WAYS[args.way](spark.read.parquet(args.path), args)


WAYS = {"sparkdl": by_sparkdl, "kept": by_sparkdl, "udf": by_udf, "tfos": by_tfos}


def main() -> None:
    args = arguments()
    lines = claim_stdout()
    with limit(args) if args.way == "limit" else on_spark(args) as action:
        for number in range(args.passes + 1):
            start, used_s = time.monotonic(), cpu_s()
            if action() != args.rows * CLASSES:
                raise ValueError("not all rows were scored")
            rate = args.rows / (time.monotonic() - start)
            cost = (cpu_s() - used_s) / args.rows * 1e6
            if number:
                write(lines, "pass", **{"rows/s": rate, "CPU s per million rows": cost})


if __name__ == "__main__":
    main()
