"""The feeds of a cluster: calls, epochs, streams, and what a new generation still has to be fed.

Runs in: driver
"""
