"""Writes the records that the page reads.

Runs in: the driver of a page's program
"""

import sparkdl.data

spark.dataSource.register(sparkdl.data.TFRecordDataSource)
df.write.format("tfrecord").mode("overwrite").save("hdfs://namenode/train")
