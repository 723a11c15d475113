"""The rows and the model of the page's program, for its variant that is killed and continues."""

import os
import signal
import threading

# block: 3. Write the program

train_df = df.selectExpr("image", "label as digit")
args = {}


def train(args, ctx):
    import tensorflow as tf

    def die():
        pause = threading.Event()
        while not ctx.last_checkpoint and ctx.batches_given().get("input", 0) < 3:
            pause.wait(0.05)
        if not ctx.restarts:
            os.kill(os.getpid(), signal.SIGKILL)

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = tf.keras.Sequential([tf.keras.Input((64,)), tf.keras.layers.Dense(10, "softmax")])
        model.compile("adam", "sparse_categorical_crossentropy")
    rows = ctx.dataset(32, x="image", y="digit")
    if not ctx.is_chief:
        threading.Thread(target=die, daemon=True).start()
    # block: 5. Look at it, and break it
    return ctx.restarts


# block: 5. Look at it, and break it
