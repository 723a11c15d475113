"""Spark ML: estimators train on a cluster of nodes, and models score in Spark's own tasks.

Runs in: driver
"""
