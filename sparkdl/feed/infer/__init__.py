"""Inference: Spark tasks send rows to a node and receive one result per row.

Runs in: feeder, agent, child
"""
