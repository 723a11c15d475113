"""TFRecord files as DataFrames, without a jar and without TensorFlow.

Runs in: driver, feeder

    sparkdl.data.read_tfrecords(spark, "s3://bucket/train")
    sparkdl.data.write_tfrecords(df, "s3://bucket/copy")

`docs/data.md` has the table of types.
"""

from sparkdl.data.files import read_tfrecords, write_tfrecords
from sparkdl.data.infer import infer_schema

__all__ = ["infer_schema", "read_tfrecords", "write_tfrecords"]
