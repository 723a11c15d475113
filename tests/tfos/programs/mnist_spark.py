"""A program for TensorFlowOnSpark: digits fed by Spark through a generator, trained, exported."""

import argparse


def main_fun(args, ctx):
    import numpy as np
    import tensorflow as tf
    from tensorflowonspark import TFNode, compat

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def build_and_compile():
        model = tf.keras.Sequential(
            [
                tf.keras.Input((64,)),
                tf.keras.layers.Dense(32, activation="relu"),
                tf.keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile(
            loss="sparse_categorical_crossentropy",
            optimizer=tf.keras.optimizers.Adam(0.01),
            metrics=["accuracy"],
        )
        return model

    tf_feed = TFNode.DataFeed(ctx.mgr, False)

    def rdd_generator():
        while not tf_feed.should_stop():
            batch = tf_feed.next_batch(1)
            if len(batch) == 0:
                return
            image, label = batch[0]
            yield np.array(image).astype(np.float32) / 16.0, np.array([label]).astype(np.int64)

    signature = (tf.TensorSpec((64,), tf.float32), tf.TensorSpec((1,), tf.int64))
    ds = tf.data.Dataset.from_generator(rdd_generator, output_signature=signature)
    ds = ds.batch(args.batch_size)
    options = tf.data.Options()
    compat.disable_auto_shard(options)
    ds = ds.with_options(options)

    with strategy.scope():
        model = build_and_compile()

    # Workers may get different numbers of rows: stop at 90 % of the steps.
    steps = int(args.rows / args.batch_size / ctx.num_workers * 0.9)
    model.fit(ds, epochs=args.epochs, steps_per_epoch=steps, verbose=2)

    compat.export_saved_model(model, args.export_dir, ctx.job_name == "chief")
    tf_feed.terminate()


if __name__ == "__main__":
    from pyspark.context import SparkContext
    from sklearn.datasets import load_digits
    from tensorflowonspark import TFCluster

    sc = SparkContext.getOrCreate()
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--cluster_size", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--export_dir", default="mnist_export")
    parser.add_argument("--tensorboard", action="store_true")
    args = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    args.rows = 1200
    rows = list(zip(images[: args.rows].tolist(), labels[: args.rows].tolist(), strict=True))
    images_labels = sc.parallelize(rows, 5)

    cluster = TFCluster.run(
        sc,
        main_fun,
        args,
        args.cluster_size,
        num_ps=0,
        tensorboard=args.tensorboard,
        input_mode=TFCluster.InputMode.SPARK,
        master_node="chief",
    )
    cluster.train(images_labels, args.epochs)
    cluster.shutdown(grace_secs=60)
