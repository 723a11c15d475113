"""Task slots: placement of nodes before a launch, lost hosts, and Spark's errors.

Runs in: driver
"""
