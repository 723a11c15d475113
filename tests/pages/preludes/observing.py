"""A cluster in a cell, an estimator and its run, reports for TensorBoard, and a trace."""

import os
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"


def read_all(args, ctx):
    while ctx.has_epoch():
        for _ in ctx.batches(64):
            pass


train = read_all

# block: In a notebook
assert feeding.result().rows_used == 6400
cluster.shutdown()

# block: Logs
df = df.selectExpr("image as features", "label")


def make():
    import keras

    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])


estimator = sparkdl.KerasEstimator(make, loss="mse", epochs=2)

# block: MLflow
(run,) = mlflow.search_runs(output_format="list")
assert run.data.metrics["loss"] == model.history["loss"][-1]
sparkdl.mlflow.autolog(disable=True)


def train(args, ctx):
    ctx.report(7, loss=0.25 + ctx.rank)


# block: Weights & Biases, TensorBoard
cluster.results()
cluster.shutdown()
writer.close()

events = EventAccumulator("runs/digits").Reload()
for name in events.Tags()["scalars"]:
    (event,) = events.Scalars(name)
    assert (event.step, event.value) in {(7, 0.25), (7, 1.25)}
assert len(events.Tags()["scalars"]) == 2
df = df.withColumn("image", df.features)

# block: Profiles
with sparkdl.launch(spark, train, framework="torch") as cluster:
    cluster.feed(df)
assert [*Path("/mnt/shared/profile").glob("rank0.*.pt.trace.json")]
