"""Collective operations between the nodes that train, whatever the framework on top.

Runs in: child
"""
