"""Estimators that train on a cluster of nodes, their parameters, and how they are saved.

Runs in: driver
"""
