"""The parts that Horovod's estimators share: parameters, stores, backends, prepared data.

Runs in: driver

https://horovod.readthedocs.io/en/v0.28.1/spark_include.html
"""
