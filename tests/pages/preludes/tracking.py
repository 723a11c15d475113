"""An estimator, its run, a function that reports, and what TensorBoard has been written."""

import os

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
df = df.selectExpr("image as features", "label")


def make():
    import keras

    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])


estimator = sparkdl.KerasEstimator(make, loss="mse", epochs=2)

# block: MLflow
(run,) = mlflow.search_runs(output_format="list")
assert run.data.metrics["loss"] == model.history["loss"][-1]
sparkdl.mlflow.autolog(disable=True)


def map_fun(args, ctx):
    ctx.report(7, loss=0.25 + ctx.rank)


# block: TensorBoard
cluster.results()
cluster.shutdown()
writer.close()

events = EventAccumulator("runs/digits").Reload()
for name in events.Tags()["scalars"]:
    (event,) = events.Scalars(name)
    assert (event.step, event.value) in {(7, 0.25), (7, 1.25)}
assert len(events.Tags()["scalars"]) == 2
