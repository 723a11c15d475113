"""One way to score the rows of Parquet files with a dense network of 784-256-10.

The model is loaded and all rows have been scored once before the clock starts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feeding import feed_session, options
from harness import claim_stdout, write
from processes import cpu_s

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CLASSES = 10
MODES = ("sparkdl", "kept", "udf", "tfos", "limit")
Action = Callable[[], int]


def make_model(folder: Path) -> None:
    """Save the network, as a SavedModel and as a `.keras` file, unless it is there."""
    import keras

    if (folder / "model.keras").exists():
        return
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((784,), name="image"),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(CLASSES),
        ]
    )
    model.export(str(folder / "saved_model"), verbose=False)
    model.save(folder / "model.keras")


def scores(scored: DataFrame) -> Action:
    """Return what has every score made, and counts them."""
    from pyspark.sql import functions

    return lambda: int(scored.agg(functions.sum(functions.size("scores"))).first()[0])


def by_sparkdl(data: DataFrame, args: argparse.Namespace) -> Action:
    from sparkdl import TFModel

    model = TFModel().setExportDir(f"{args.model}/saved_model").setBatchSize(args.batch)
    model.setInputMapping({"x": "image"}).setOutputMapping({"output_0": "scores"})
    if args.mode != "kept":
        return scores(model.transform(data))
    everything = model.transform(data)
    counted = scores(everything)

    def action() -> int:
        everything.write.format("noop").mode("overwrite").save()
        return args.rows * CLASSES  # which `counted` has found before

    if counted() != args.rows * CLASSES:
        raise ValueError("not all rows were scored")
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
    """Give what one process does that reads the files and predicts."""
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
    """Give what Spark does with two executors of one slot."""
    ways = {
        "sparkdl": by_sparkdl,
        "kept": by_sparkdl,
        "udf": by_udf,
        "tfos": by_tfos,
    }
    with feed_session(slots=1, partitions=args.files) as spark:
        spark.conf.set("spark.sql.files.maxPartitionBytes", "8g")  # one partition for each file
        yield ways[args.mode](spark.read.parquet(args.path), args)


def main() -> None:
    """Score, and write a line for each pass."""
    parser = options(__doc__)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--model", required=True, help="folder of the saved model")
    parser.add_argument("--batch", type=int, default=1024, help="rows that the model is given")
    parsed = parser.parse_args()
    lines = claim_stdout()
    with limit(parsed) if parsed.mode == "limit" else on_spark(parsed) as action:
        for number in range(parsed.epochs + 1):
            start, used = time.monotonic(), cpu_s()
            if action() != parsed.rows * CLASSES:
                raise ValueError("not all rows were scored")
            took = {"seconds": time.monotonic() - start, "cpu_s": cpu_s() - used}
            if number:
                write(lines, {"event": "pass", "rows": parsed.rows, **took})


if __name__ == "__main__":
    main()
