"""TensorFlow reads what we write, and we read what TensorFlow writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.data.columns import EXAMPLE, SEQUENCE_EXAMPLE, columns_of, list_type
from sparkdl.data.examples import decode, encode
from sparkdl.data.files import read_file
from sparkdl.data.framing import frame
from sparkdl.data.source import Destination
from sparkdl.storage.systems import locate

pytestmark = pytest.mark.tensorflow

COMPRESSIONS = {"none": "", "gzip": "GZIP", "zlib": "ZLIB"}
EXAMPLES = pa.record_batch(
    {
        "id": pa.array(range(50), pa.int64()),
        "negative": pa.array([-i if i % 7 else None for i in range(50)], pa.int64()),
        "image": pa.array([[i / 8] * 6 for i in range(50)], list_type(pa.float32(), 1)),
        "ragged": pa.array([[i] * (i % 4) for i in range(50)], list_type(pa.int64(), 1)),
        "text": pa.array([f"é{i}" for i in range(50)]),
        "blobs": pa.array([[b"\xff", b""]] * 50, list_type(pa.binary(), 1)),
    }
)
SEQUENCES = pa.record_batch(
    {
        "id": pa.array(range(9), pa.int64()),
        "frames": pa.array([[[i / 2, 1.0]] * i for i in range(9)], list_type(pa.float32(), 2)),
        "words": pa.array([[["a"], ["b"]]] * 9, list_type(pa.string(), 2)),
    }
)


def save(folder: Path, batch: pa.RecordBatch, record_type: str, compression: str) -> str:
    columns = columns_of(batch.schema, record_type)
    to = Destination.at(str(folder), {})
    to.begin()
    with to.part(0, compression) as (name, file):
        file.write(frame(encode(batch, columns, record_type)))
    to.commit([name], is_overwrite=False)
    return str(folder / name)


def load(path: Path, schema: pa.Schema, record_type: str = EXAMPLE) -> pa.Table:
    columns = columns_of(schema, record_type)
    chunks = read_file(locate(str(path))[0], str(path), nbytes=1000)
    return pa.Table.from_batches(
        pa.RecordBatch.from_arrays(decode(chunk, columns, record_type), schema=schema)
        for chunk in chunks
    )


@pytest.mark.parametrize("compression", list(COMPRESSIONS))
def test_tensorflow_parses_our_examples(tmp_path: Path, compression: str) -> None:
    import tensorflow as tf

    path = save(tmp_path, EXAMPLES, EXAMPLE, compression)
    io = tf.io
    spec = {
        "id": io.FixedLenFeature([], tf.int64),
        "negative": io.FixedLenFeature([], tf.int64, default_value=1),
        "image": io.FixedLenFeature([2, 3], tf.float32),
        "ragged": io.RaggedFeature(tf.int64),
        "text": io.FixedLenFeature([], tf.string),
        "blobs": io.FixedLenFeature([2], tf.string),
    }
    dataset = tf.data.TFRecordDataset(path, COMPRESSIONS[compression]).batch(50)
    (parsed,) = [io.parse_example(batch, spec) for batch in dataset]
    assert parsed["id"].numpy().tolist() == list(range(50))
    assert parsed["negative"].numpy().tolist() == [-i if i % 7 else 1 for i in range(50)]
    assert parsed["image"].numpy().reshape(50, 6).tolist() == EXAMPLES["image"].to_pylist()
    assert parsed["ragged"].to_list() == EXAMPLES["ragged"].to_pylist()
    assert [text.decode() for text in parsed["text"].numpy()] == EXAMPLES["text"].to_pylist()
    assert parsed["blobs"].numpy().tolist() == EXAMPLES["blobs"].to_pylist()


@pytest.mark.parametrize("compression", list(COMPRESSIONS))
def test_we_read_examples_of_tensorflow(tmp_path: Path, compression: str) -> None:
    import tensorflow as tf

    train = tf.train
    path = tmp_path / "data"
    with tf.io.TFRecordWriter(str(path), COMPRESSIONS[compression]) as writer:
        for row in EXAMPLES.to_pylist():
            features = {
                name: _feature(train, value) for name, value in row.items() if value is not None
            }
            message = train.Example(features=train.Features(feature=features))
            writer.write(message.SerializeToString())
    assert load(path, EXAMPLES.schema) == pa.Table.from_batches([EXAMPLES])


def test_tensorflow_parses_our_sequence_examples_and_we_read_its(tmp_path: Path) -> None:
    import tensorflow as tf

    path = save(tmp_path / "ours", SEQUENCES, SEQUENCE_EXAMPLE, "none")
    theirs = tmp_path / "theirs"
    with tf.io.TFRecordWriter(str(theirs)) as writer:
        for number, record in enumerate(tf.data.TFRecordDataset(path)):
            context, lists = tf.io.parse_single_sequence_example(
                record,
                {"id": tf.io.FixedLenFeature([], tf.int64)},
                {
                    "frames": tf.io.FixedLenSequenceFeature([2], tf.float32),
                    "words": tf.io.FixedLenSequenceFeature([], tf.string),
                },
            )
            assert int(context["id"]) == number
            assert np.array_equal(
                lists["frames"], np.array([[number / 2, 1]] * number).reshape(-1, 2)
            )
            assert lists["words"].numpy().tolist() == [b"a", b"b"]
            message = tf.train.SequenceExample.FromString(record.numpy())
            writer.write(message.SerializeToString())
    table = load(theirs, SEQUENCES.schema, SEQUENCE_EXAMPLE)
    assert table == pa.Table.from_batches([SEQUENCES])


def _feature(train: Any, value: Any) -> Any:
    values = value if isinstance(value, list) else [value]
    values = [each.encode() if isinstance(each, str) else each for each in values]
    if all(isinstance(each, bytes) for each in values) and values:
        return train.Feature(bytes_list=train.BytesList(value=values))
    if any(isinstance(each, float) for each in values):
        return train.Feature(float_list=train.FloatList(value=values))
    return train.Feature(int64_list=train.Int64List(value=values))
