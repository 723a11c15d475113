"""The models of the page's loops, which fail once: each goes on from its last checkpoint."""

import tempfile

import jax
import jax.numpy as jnp
import keras
import numpy as np
import tensorflow as tf

from sparkdl.node.context import current

ROWS, EPOCHS, FAILS_AT = 1024, 3, 7
steps = []


def fail_once():
    steps.append(1)
    if len(steps) == FAILS_AT and current().is_chief and not current().restarts:
        raise RuntimeError("the failure of the page's test")


def resumes(train, framework):
    with sparkdl.launch(
        spark,
        train,
        nodes=2,
        framework=framework,
        checkpoint_dir=f"{tempfile.mkdtemp()}/run",
        max_restarts=1,
    ) as cluster:
        fed = cluster.feed(df, epochs=EPOCHS)
    assert fed.rows_used == ROWS * EPOCHS, fed
    assert 0 < fed.rows_covered < fed.rows_used, fed


# block: Recovery: failures, checkpoints, replay
assert report.rows_used == 60_000, report
assert 0 < report.rows_covered < 60_000, report

# block: Keras
with sparkdl.launch(spark, train, nodes=2, checkpoint_dir=f"{tempfile.mkdtemp()}/keras") as cluster:
    cluster.feed(df.limit(1000), epochs=3)

df = spark.range(ROWS, numPartitions=4).selectExpr(
    "array_repeat(cast(id / 1024 as float), 64) as image", "id % 10 as label"
)


def build_model():
    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])


def train_step(model, optimizer, x, y):
    def step(x, y):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x))
            loss = tf.reduce_mean(losses)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    model.distribute_strategy.run(step, args=(x, y))
    fail_once()


# block: TensorFlow and JAX loops
resumes(train, "tensorflow")


def initial_state():
    return {"weights": jnp.zeros((64, 10)), "bias": jnp.zeros(10)}


@jax.jit
def descend(state, x, y, weight):
    def loss(state):
        scores = jax.nn.log_softmax(x @ state["weights"] + state["bias"])
        each = -jnp.take_along_axis(scores, y[:, None], axis=1)[:, 0]
        return jnp.sum(each * weight) / jnp.sum(weight)

    return jax.tree.map(lambda w, s: w - 0.1 * s, state, jax.grad(loss)(state))


def train_step(state, x, y, weight):
    fail_once()
    return descend(state, x, y, weight)


# block: TensorFlow and JAX loops
resumes(train, "jax")
