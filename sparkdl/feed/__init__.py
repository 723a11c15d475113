"""The data plane: rows become Arrow batches, travel by Flight, lie in a log, are read by offset.

Runs in: feeder, agent, child
"""
