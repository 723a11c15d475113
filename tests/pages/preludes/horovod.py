"""Models and data of the page's programs."""

import tempfile

import torch
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession

from sparkdl.horovod.spark.runner import run_elastic
from sparkdl.node.context import current


def make_model():
    return torch.nn.Linear(4, 2)


# block: Horovod's API
assert set(results[0]) == {"weight", "bias"}
assert results[1] is None


# block: HorovodRunner
assert set(weights) == {"weight", "bias"}


def program():
    import sparkdl.horovod.torch as hvd

    hvd.init()
    model, epochs, batches_per_epoch = make_model(), 1, 201
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    begun_at = []

    def step(state):
        begun_at.append(state.batch)
        if state.batch == 150 and not current().restarts:
            raise RuntimeError("the failure of the page's test")
        optimizer.zero_grad()
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()

    # block: Elastic training
    return begun_at[0], len(begun_at)


folder = tempfile.mkdtemp()
ended = run_elastic(program, num_proc=2, reset_limit=1, checkpoint_dir=folder, framework="torch")
assert ended == [(100, 101)] * 2, ended

rows = [(Vectors.dense([i % 20.0, 1.0, 0.0, 0.0]), i % 20 / 10) for i in range(100)]
df = SparkSession.builder.getOrCreate().createDataFrame(rows, ["features", "label"])
# block: Estimators
assert [set(epoch) for epoch in fitted.getHistory()] == [{"epoch", "train", "validation"}] * 2
assert fitted.transform(df).select("label__output").count() == 100


# block: TensorFlow and Keras
sparkdl.horovod.spark.run(train, num_proc=2)
