"""TensorFlow reads what we write, and we read what TensorFlow writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sparkdl.data.examples import columns_of, decode, encode, list_type
from sparkdl.data.framing import frame, read_file
from sparkdl.storage.systems import locate

pytestmark = [pytest.mark.tensorflow, pytest.mark.smoke]

EXAMPLES = pa.record_batch(
    {
        "id": pa.array(range(50), pa.int64()),
        "negative": pa.array([-i if i % 7 else None for i in range(50)], pa.int64()),
        "image": pa.array([[i / 8] * 6 for i in range(50)], list_type(pa.float32())),
        "ragged": pa.array([[i] * (i % 4) for i in range(50)], list_type(pa.int64())),
        "text": pa.array([f"é{i}" for i in range(50)]),
        "blobs": pa.array([[b"\xff", b""]] * 50, list_type(pa.binary())),
    }
)


def load(path: Path, schema: pa.Schema) -> pa.Table:
    columns = columns_of(schema)
    chunks = read_file(locate(str(path))[0], str(path), nbytes=1000)
    return pa.Table.from_batches(
        pa.RecordBatch.from_arrays(decode(chunk, columns), schema=schema) for chunk in chunks
    )


def test_tensorflow_parses_our_examples(tmp_path: Path) -> None:
    import tensorflow as tf

    path = tmp_path / "data"
    path.write_bytes(frame(encode(EXAMPLES, columns_of(EXAMPLES.schema))))
    io = tf.io
    spec = {
        "id": io.FixedLenFeature([], tf.int64),
        "negative": io.FixedLenFeature([], tf.int64, default_value=1),
        "image": io.FixedLenFeature([2, 3], tf.float32),
        "ragged": io.RaggedFeature(tf.int64),
        "text": io.FixedLenFeature([], tf.string),
        "blobs": io.FixedLenFeature([2], tf.string),
    }
    dataset = tf.data.TFRecordDataset(str(path)).batch(50)
    (parsed,) = [io.parse_example(batch, spec) for batch in dataset]
    assert parsed["id"].numpy().tolist() == list(range(50))
    assert parsed["negative"].numpy().tolist() == [-i if i % 7 else 1 for i in range(50)]
    assert parsed["image"].numpy().reshape(50, 6).tolist() == EXAMPLES["image"].to_pylist()
    assert parsed["ragged"].to_list() == EXAMPLES["ragged"].to_pylist()
    assert [text.decode() for text in parsed["text"].numpy()] == EXAMPLES["text"].to_pylist()
    assert parsed["blobs"].numpy().tolist() == EXAMPLES["blobs"].to_pylist()


def test_we_read_examples_of_tensorflow(tmp_path: Path) -> None:
    import tensorflow as tf

    train = tf.train
    path = tmp_path / "data"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in EXAMPLES.to_pylist():
            features = {n: _feature(train, value) for n, value in row.items() if value is not None}
            message = train.Example(features=train.Features(feature=features))
            writer.write(message.SerializeToString())
    assert load(path, EXAMPLES.schema) == pa.Table.from_batches([EXAMPLES])


def _feature(train: Any, value: Any) -> Any:
    values = value if isinstance(value, list) else [value]
    values = [each.encode() if isinstance(each, str) else each for each in values]
    if all(isinstance(each, bytes) for each in values) and values:
        return train.Feature(bytes_list=train.BytesList(value=values))
    if any(isinstance(each, float) for each in values):
        return train.Feature(float_list=train.FloatList(value=values))
    return train.Feature(int64_list=train.Int64List(value=values))
