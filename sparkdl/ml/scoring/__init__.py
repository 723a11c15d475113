"""Models that score DataFrames in Spark's own tasks.

Runs in: driver, child, feeder. Also in the process that describes a model to the driver.
"""
