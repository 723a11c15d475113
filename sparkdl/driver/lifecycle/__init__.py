"""The life of a cluster as a state machine. Pure: no sockets, threads, clocks or Spark.

Runs in: driver
"""
