"""`from petastorm.spark import SparkDatasetConverter, make_spark_converter`, of sparkdl.

Runs in: driver, child
"""

from sparkdl.petastorm.spark.spark_dataset_converter import (
    SparkDatasetConverter,
    make_spark_converter,
)

__all__ = ["SparkDatasetConverter", "make_spark_converter"]
