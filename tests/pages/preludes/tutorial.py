"""What the reader does to the page's programs: runs them, kills a node, calls the test."""

import os
import signal
import threading

# block: 3. Write the program
train_torch = train


def killed(args, ctx):
    def die():
        pause = threading.Event()
        while ctx.batches_given().get("input", 0) < 30:
            pause.wait(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

    if not ctx.is_chief and not ctx.restarts:
        threading.Thread(target=die, daemon=True).start()
    train_torch(args, ctx)
    return ctx.restarts


digits = spark.range(1_000, numPartitions=4).selectExpr(
    "array_repeat(cast(id % 10 / 10 as float), 64) as image", "id % 10 as digit"
)
with sparkdl.launch(
    spark, killed, nodes=2, framework="torch", max_restarts=1, checkpoint_dir="/tmp/killed"
) as cluster:
    cluster.feed(digits, epochs=40)
    assert cluster.results() == [1, 1]

# block: Test `train` without Spark
test_train_learns()
