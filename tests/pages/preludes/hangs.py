"""A cluster that waits for its feed.

Runs in: the driver of a page's program
"""

cluster = sparkdl.launch(spark, train, args, nodes=2)
