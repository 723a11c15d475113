"""After the page's program, a cluster that waits for its feed.

Runs in: the driver of a page's program
"""

# block: Hangs and stragglers
cluster = sparkdl.launch(spark, train, args, nodes=2)
