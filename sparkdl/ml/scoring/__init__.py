"""Models that score DataFrames in Spark's own tasks.

Runs in: driver, feeder
"""
