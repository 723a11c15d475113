"""After the page's program, a cluster that waits for its feed."""

# block: Hangs and stragglers
cluster = sparkdl.launch(spark, train, args, nodes=2)
