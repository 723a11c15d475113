"""Parquet data sets with the values that Spark reads: discovery, shares of the rows, reading.

Runs in: driver, child
"""
