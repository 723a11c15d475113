"""Trainings that stand still, and nodes that do not keep up.

Runs in: driver
"""
