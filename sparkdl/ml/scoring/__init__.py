"""Models that score DataFrames in Spark's own tasks.

Runs in: feeder
"""
