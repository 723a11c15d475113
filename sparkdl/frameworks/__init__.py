"""Connect each deep-learning framework with its cluster: one file a framework.

Runs in: child
"""
