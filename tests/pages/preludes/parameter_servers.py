"""Rows, arguments and models of the page's three clusters.

Runs in: the driver of a page's program
"""

import argparse
import tempfile

# block: Parameter servers fed by Spark

frame = spark.range(512, numPartitions=4).selectExpr(
    "array_repeat(cast(id / 512 as float), 784) as image", "id % 10 as label"
)
training, test = frame, frame.limit(64)
args = argparse.Namespace(model_dir=tempfile.mkdtemp())

# block: The chief's calls

with sparkdl.launch(
    spark, train, args, nodes=4, roles=sparkdl.Roles(ps=1, chief="chief")
) as cluster:
    fed = cluster.feed(frame, epochs=2)
assert fed.rows_used == 1024, fed


def make_model():
    import tensorflow as tf

    model = tf.Module()
    model.weights = tf.Variable(tf.zeros([784, 10]))
    return model


def train(args, ctx):  # the block's `evaluate`, or a chief that saves once
    import tensorflow as tf

    if ctx.job_name == "evaluator":
        return evaluate(args, ctx)
    strategy = ctx.parameter_server_strategy()
    with strategy.scope():
        model = make_model()
    tf.train.Checkpoint(model=model).save(f"{args.model_dir}/ckpt")
    ctx.fed_dataset_fn(64, x="image", y="label").terminate()
    return None


# block: The evaluator
