"""A program for TensorFlowOnSpark: a SavedModel answers rows that Spark feeds."""

import argparse


def main_fun(args, ctx):
    import numpy as np
    import tensorflow as tf

    predict = tf.saved_model.load(args.export_dir).signatures["serving_default"]
    (name,) = predict.structured_input_signature[1]
    tf_feed = ctx.get_data_feed(train_mode=False, input_mapping={"image": "x", "label": "y"})
    while not tf_feed.should_stop():
        batch = tf_feed.next_batch(100)
        if len(batch["x"]) > 0:
            images = tf.constant(np.array(batch["x"], np.float32) / 16.0)
            (scores,) = predict(**{name: images}).values()
            found = np.argmax(scores, axis=1)
            tf_feed.batch_results(
                [(int(y), int(p)) for y, p in zip(batch["y"], found, strict=True)]
            )


if __name__ == "__main__":
    from pyspark.context import SparkContext
    from sklearn.datasets import load_digits
    from tensorflowonspark import TFCluster

    sc = SparkContext.getOrCreate()
    parser = argparse.ArgumentParser()
    parser.add_argument("--export_dir", default="mnist_export")
    parser.add_argument("--output", default="predictions")
    args, rest = parser.parse_known_args()

    images, labels = load_digits(return_X_y=True)
    rows = sc.parallelize(list(zip(images[1200:].tolist(), labels[1200:].tolist(), strict=True)), 3)
    cluster = TFCluster.run(
        sc, main_fun, args, 1, 0, False, TFCluster.InputMode.SPARK, master_node=None
    )
    cluster.inference(rows).map(lambda pair: f"{pair[0]} {pair[1]}").saveAsTextFile(args.output)
    cluster.shutdown()
