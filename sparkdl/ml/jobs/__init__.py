"""Training as Spark jobs: no long-running nodes, no ports; each iteration is a Spark job.

Runs in: driver
"""
