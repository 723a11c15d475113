"""Models of the page, and functions of nodes around what is the body of one."""

import keras
import numpy as np
from jax.sharding import PartitionSpec

# block: JAX
assert losses == losses[:1] * 2  # nodes=2


def build_and_compile():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(10, name="hidden")])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


# block: Keras
with sparkdl.launch(spark, train, args, nodes=2, framework="jax") as cluster:
    cluster.feed(df, epochs=3)


def train(args, ctx):
    # block: Keras
    keras.distribution.set_distribution(distribution)
    keras.utils.set_random_seed(0)
    kernel = build_and_compile().layers[0].kernel
    return kernel.value.addressable_shards[0].data.shape


assert set(sparkdl.run(spark, train, nodes=2 * 2, framework="jax")) == {(2, 5)}


def train(args, ctx):
    from jax.experimental import multihost_utils

    step, mesh, spec = 1, ctx.mesh(model=-1), PartitionSpec(None, "model")
    columns = np.arange(20.0, dtype="float32").reshape(2, 10)[:, 5 * ctx.rank : 5 * ctx.rank + 5]
    if not ctx.last_checkpoint:
        weights = multihost_utils.host_local_array_to_global_array(columns, mesh, spec)
        # block: When a node fails
        raise RuntimeError("the failure of the page's test")
    # block: When a node fails
    assert weights.shape == (2, 10)
    return bool((weights.addressable_shards[0].data == columns).all())


assert sparkdl.run(
    spark, train, nodes=2, framework="jax", checkpoint_dir="/models/jax", max_restarts=1
) == [True, True]
