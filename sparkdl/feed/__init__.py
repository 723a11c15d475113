"""The data plane: Arrow batches travel by Flight, wait in spools, lie in logs, and are read.

Runs in: feeder, agent, child
"""
