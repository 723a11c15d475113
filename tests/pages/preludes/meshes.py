"""What the functions of JAX train, and their names."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

# block: Meshes: data and model parallel


def trains(framework):
    with sparkdl.launch(spark, train, args, nodes=4, framework=framework) as cluster:
        fed = cluster.feed(df)
    assert min(fed.steps.values()) > 0, fed


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
