"""Files for the stream, the model, and somebody who stops the query when it has had rows.

Runs in: the driver of a page's program
"""

import threading
from pathlib import Path

df.selectExpr("image as features", "cast(label as float) as label").write.parquet("/data/incoming")


def make_model():
    import keras
    import tensorflow as tf

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def stop_after_rows():
    pause = threading.Event()
    while not any(
        each.numInputRows for query in spark.streams.active for each in query.recentProgress
    ):
        pause.wait(0.2)
    for query in spark.streams.active:
        query.stop()


threading.Thread(target=stop_after_rows, daemon=True).start()

# block: Training on a stream
assert Path("/models/online.keras").exists()
