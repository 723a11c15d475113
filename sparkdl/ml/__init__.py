"""Spark ML: estimators that train on a cluster of nodes, models that score in Spark's own tasks.

Runs in: driver
"""
