"""What the page's functions train, on four nodes each; functions of the frameworks by their names.

Runs in: the driver of a page's program
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

NODES = 2 * 2
df = spark.range(256, numPartitions=4).selectExpr(
    "array_repeat(cast(id / 256 as float), 64) as image", "id % 10 as label"
)


def trains(framework):
    args = argparse.Namespace(epochs=1)
    with sparkdl.launch(spark, train, args, nodes=NODES, framework=framework) as cluster:
        fed = cluster.feed(df, epochs=args.epochs)
    assert min(fed.steps.values()) > 0, fed


def build_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def train_step(model, x, y):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    assert tuple(model[0].weight.to_local().shape) == (8, 64)  # of 32 rows


# block: PyTorch
trains("torch")

initial = np.ones((64, 10), "float32")


def train_step(weights, x, y, weight):
    assert weights.addressable_shards[0].data.shape == (64, 5)
    return jax.jit(step)(weights, x, y, weight)


def step(weights, x, y, weight):
    def loss(weights):
        scores = jax.nn.log_softmax(x @ weights)
        each = -jnp.take_along_axis(scores, y[:, None], axis=1)[:, 0]
        return jnp.sum(each * weight) / jnp.sum(weight)

    value, slopes = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * slopes, value


# block: JAX
trains("jax")


def train_step(images, labels):
    from tensorflow.experimental import dtensor

    mesh = dtensor.fetch_layout(images).mesh
    rows = tf.function(lambda x, y: (gathered(x, mesh), gathered(y, mesh)))(images, labels)
    assert [each.shape[0] for each in rows] == [128, 128]  # 64 of each of two groups


# block: TensorFlow
trains("tensorflow")
