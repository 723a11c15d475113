"""A cluster that runs the page's training, and the trace that it leaves."""

from pathlib import Path

# block: PyTorch
with sparkdl.launch(spark, train, nodes=2, framework="torch") as cluster:
    cluster.feed(df, epochs=2)
assert [*Path("/mnt/shared/profile").glob("rank0.*.pt.trace.json")]
