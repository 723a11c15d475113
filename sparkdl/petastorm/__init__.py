"""Petastorm's names for Spark's users: the converter of DataFrames, and its `TransformSpec`.

Runs in: driver, child

`import sparkdl` has `make_spark_converter`. https://petastorm.readthedocs.io
"""

from __future__ import annotations

from functools import partial

from sparkdl.core.namesakes import missing_name
from sparkdl.petastorm.reader import TransformSpec

__all__ = ["TransformSpec"]
__getattr__ = partial(missing_name, __name__)
