"""Rows, arguments and models of the page's clusters."""

import argparse
import tempfile

# block: Parameter servers

training = spark.range(512, numPartitions=4).selectExpr(
    "array_repeat(cast(id / 512 as float), 784) as image", "id % 10 as label"
)
test = training.limit(64)
args = argparse.Namespace(model_dir=tempfile.mkdtemp())


def make_model():
    import tensorflow as tf

    model = tf.Module()
    model.weights = tf.Variable(tf.zeros([784, 10]))
    return model


def train(args, ctx):  # the block's `evaluate`, or a chief that saves once
    import tensorflow as tf

    if ctx.job_name == "evaluator":
        return evaluate(args, ctx)
    tf.train.Checkpoint(model=make_model()).save(f"{args.model_dir}/ckpt")
    assert sum(1 for _ in ctx.dataset(64, x="image", y="label"))
    return None


# block: The evaluator
