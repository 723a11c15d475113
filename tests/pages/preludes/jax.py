"""Models of the page, and functions of nodes around what is the body of one."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

# block: JAX
assert losses == losses[:1] * 4


def build_and_compile():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(10, name="hidden")])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


# block: Keras on JAX
with sparkdl.launch(spark, train, args, nodes=2, framework="jax") as cluster:
    cluster.feed(df, epochs=3)


def train(args, ctx):
    # block: Keras on JAX
    keras.distribution.set_distribution(distribution)
    keras.utils.set_random_seed(0)
    kernel = build_and_compile().layers[0].kernel
    return kernel.value.addressable_shards[0].data.shape


assert set(sparkdl.run(spark, train, nodes=4, framework="jax")) == {(2, 5)}

# block: Meshes
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


# block: Meshes
with sparkdl.launch(spark, train, args, nodes=4, framework="jax") as cluster:
    fed = cluster.feed(images)
assert min(fed.steps.values()) > 0, fed


def train(args, ctx):
    step, mesh = 1, ctx.mesh(model=-1)
    columns = np.arange(20.0, dtype="float32").reshape(2, 10)[:, 5 * ctx.rank : 5 * ctx.rank + 5]
    from jax.experimental import multihost_utils

    if not ctx.last_checkpoint:
        spec = PartitionSpec(None, "model")
        weights = multihost_utils.host_local_array_to_global_array(columns, mesh, spec)
        # block: When a node fails
        raise RuntimeError("the failure of the page's test")
    spec = PartitionSpec(None, "model")
    # block: When a node fails
    assert weights.shape == (2, 10)
    return bool((weights.addressable_shards[0].data == columns).all())


assert sparkdl.run(
    spark, train, nodes=2, framework="jax", checkpoint_dir="/models/jax", max_restarts=1
) == [True, True]
