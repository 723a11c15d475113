"""Files that a child reads itself: as far ahead as there is room, epoch after epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sparkdl.control.channel import Consumed
from sparkdl.core.errors import ConfigError, ReadError
from sparkdl.feed.reader.batches import EpochBatches
from sparkdl.feed.reader.files import FileOrder, OwnFiles
from tests.doubles.feeds import FILE_ROWS as ROWS, folder as folder, values

LITTLE = 1 << 16


@contextmanager
def reading(
    folder: Path, nbytes: int = 1 << 28, told: list[Consumed] | None = None, **order: Any
) -> Iterator[OwnFiles]:
    own = OwnFiles("parquet:0", list[Consumed]().append if told is None else told.append, nbytes)
    own.reader.registry.tracks = True
    own.reader.begin()
    own.begin(FileOrder((str(folder),), **order))
    try:
        yield own
    finally:
        own.stop()
        own.join(10)
        assert not own.is_alive(), "it ends in time although nobody reads"


@pytest.mark.parametrize("nbytes", [LITTLE, 1 << 28])
def test_files_are_read_for_ever_and_at_most_one_epoch_ahead(folder: Path, nbytes: int) -> None:
    with reading(folder, nbytes) as own:
        for epoch in range(5):
            assert values(own.reader) == list(range(ROWS))
            assert max((e for e in own.reader._cursor._epochs), default=0) <= epoch + 2


def test_no_more_is_here_than_there_is_room_for(folder: Path) -> None:
    with reading(folder, LITTLE) as own:
        batches = iter(EpochBatches(own.reader, 10))
        for _ in range(20):
            next(batches)
            assert sum(own._held.values()) <= 2 * LITTLE


def test_shuffled_rows_come_once_an_epoch_in_another_order(folder: Path) -> None:
    with (
        reading(folder, nodes=(0, 1), node=0, seed=7) as one,
        reading(folder, LITTLE, nodes=(0, 1), node=1, seed=7) as other,
    ):
        orders = []
        for _ in range(3):
            parts = [values(own.reader, 50) for own in (one, other)]
            assert sorted(parts[0] + parts[1]) == list(range(ROWS))
            orders.append(tuple(parts[1]))
    assert len(set(orders)) == 3


def test_used_rows_are_told_by_number_and_covered_ones_are_not_read(folder: Path) -> None:
    told: list[Consumed] = []
    done = {0: {0: ((0, ROWS),)}, 1: {0: ((0, 1500),)}}
    with reading(folder, LITTLE, told, done=done) as own:
        batches = iter(EpochBatches(own.reader, 100))
        assert next(batches)["x"].tolist() == list(range(1500, 1600))
        assert own.rows(own.reader.position(None)) == {1: {0: ((1500, 1600),)}}
        assert len(list(itertools.chain(batches))) == 4
    assert all(message.is_own for message in told)
    assert told[-1].given.steps == 5


def test_nothing_to_read_is_an_error_for_user_code(tmp_path: Path) -> None:
    with reading(tmp_path) as own:
        for _ in range(2):
            with pytest.raises(ConfigError, match="no Parquet file found"):
                values(own.reader)


def test_file_that_vanishes_between_epochs_is_an_error_for_user_code(folder: Path) -> None:
    with reading(folder, LITTLE) as own:
        assert len(values(own.reader, 50)) == ROWS
        (folder / "1.parquet").unlink()
        with pytest.raises(ReadError, match=r"1\.parquet"):
            for _ in range(4):
                values(own.reader, 50)
