"""The way of rows from a Spark task to the agents: requests, shares, streams.

Runs in: feeder, agent
"""
