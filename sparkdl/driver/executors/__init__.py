"""Where nodes and feeders run: on a Spark cluster, or as plain local processes.

Runs in: driver
"""
