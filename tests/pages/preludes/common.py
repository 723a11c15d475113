"""What every page takes for granted: a session, a DataFrame, a function that reads its feed."""

from pyspark.sql import SparkSession

import sparkdl

spark = SparkSession.builder.getOrCreate()
sc = spark.sparkContext
df = spark.range(64).selectExpr(
    "cast(id as float) as x", "array_repeat(cast(id as float), 64) as image", "id % 10 as label"
)
args = {"epochs": 3}


def train(args, ctx):
    return sum(len(batch["label"]) for batch in ctx.batches(64))
