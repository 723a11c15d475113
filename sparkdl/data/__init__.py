"""TFRecord files as a data source of Spark, without a jar.

Runs in: driver, feeder

    spark.dataSource.register(sparkdl.data.TFRecordDataSource)
    spark.read.format("tfrecord").load("s3://bucket/train")
    df.write.format("tfrecord").mode("append").save("s3://bucket/copy")

Spark 3.5 has no data sources in Python: `read_tfrecords` and `write_tfrecords` are for any version.
`docs/tfrecords.md` has the options and the table of types. TensorFlow is not needed.
"""

from sparkdl.data.frames import read_tfrecords, write_tfrecords
from sparkdl.data.infer import infer_schema
from sparkdl.data.source import TFRecordDataSource

__all__ = ["TFRecordDataSource", "infer_schema", "read_tfrecords", "write_tfrecords"]
