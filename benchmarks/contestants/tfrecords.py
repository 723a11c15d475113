"""Reads TFRecord files twice, the second time on the clock: with TensorFlow, sparkdl, or Spark.

Every contestant has all values of all rows in memory, in batches: tensors, or Arrow arrays. In
Spark they go on from Python to the JVM, which drops them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import claim_stdout, session, write
from processes import cpu_s
from tfrecord_data import PIXELS, schema

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 1024


def tensorflow(path: str, kind: str, threads: int) -> Callable[[], int]:
    """Return a function that counts the rows of `TFRecordDataset` and `parse_example`."""
    import tensorflow as tf

    if threads == 1:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)

    def feature(field: pa.Field) -> Any:
        leaf = getattr(field.type, "value_type", field.type)
        dtype = {"float": tf.float32, "int64": tf.int64}.get(str(leaf), tf.string)
        if leaf is field.type:
            return tf.io.FixedLenFeature([], dtype)
        is_even = dtype is tf.float32
        return tf.io.FixedLenFeature([PIXELS], dtype) if is_even else tf.io.RaggedFeature(dtype)

    features = {field.name: feature(field) for field in schema(kind)}
    last = schema(kind).names[-1]
    files = sorted(str(file) for file in Path(path).glob("part-*"))

    def read() -> int:
        data = tf.data.TFRecordDataset(files, num_parallel_reads=threads).batch(BATCH_ROWS)
        data = data.map(
            lambda batch: tf.io.parse_example(batch, features), num_parallel_calls=threads
        )
        options = tf.data.Options()
        options.threading.private_threadpool_size = threads
        return sum(len(batch[last]) for batch in data.with_options(options).prefetch(2))

    return read


def sparkdl(path: str, kind: str, threads: int) -> Callable[[], int]:
    """Return a function that counts the rows of sparkdl's reader, in one thread."""
    from sparkdl.data.examples import columns_of, decode
    from sparkdl.data.framing import find, read_file

    columns = columns_of(schema(kind))

    def read() -> int:
        storage, files = find([path], {})
        return sum(
            len(decode(chunk, columns)[0]) for file in files for chunk in read_file(storage, file)
        )

    return read


@contextmanager
def spark(path: str, kind: str, threads: int) -> Iterator[Callable[[], int]]:
    """Give a function that has Spark read the files in so many tasks at a time."""
    from pyspark.sql.pandas.types import from_arrow_schema

    from sparkdl.data import read_tfrecords

    with session("bench-tfrecords", slots=threads, executors=1) as active:
        frame = read_tfrecords(active, path, from_arrow_schema(schema(kind)))
        rows = frame.count()

        def read() -> int:
            frame.write.format("noop").mode("overwrite").save()
            return int(rows)

        yield read


def main() -> None:
    """Read once to warm up, once on the clock, and write a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--how", choices=["tensorflow", "sparkdl", "spark"], required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parsed = parser.parse_args()
    lines = claim_stdout()
    arguments = parsed.path, parsed.kind, parsed.threads
    plain = {"tensorflow": tensorflow, "sparkdl": sparkdl}.get(parsed.how)
    with nullcontext(plain(*arguments)) if plain else spark(*arguments) as read:
        read()
        start, start_cpu_s = time.perf_counter(), cpu_s()
        rows = read()
        seconds, used_s = time.perf_counter() - start, cpu_s() - start_cpu_s
    write(lines, {"event": "done", "seconds": seconds, "cpu_s": used_s, "rows": rows})


if __name__ == "__main__":
    main()
