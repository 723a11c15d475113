"""Where data sets lie: file systems as Spark names them, and the Parquet files there.

Runs in: driver, agent, feeder
"""
