"""The way of rows from a Spark task to the agents, and of results back.

Runs in: agent
"""
