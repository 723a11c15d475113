"""Writes the files that the README trains from.

Runs in: the driver of a page's program
"""

df.selectExpr("image features", "label").write.parquet("/data/train")
