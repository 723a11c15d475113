"""Rows that were read, by segment, become rows by partition until a checkpoint covers them."""

from __future__ import annotations

from sparkdl.control.rows import EpochRows
from sparkdl.feed.store.provenance import Provenance


def test_rows_are_told_by_the_epoch_that_read_them_and_merged() -> None:
    provenance = Provenance()
    provenance.add(0, 0, ((0, 0, 10),))
    provenance.add(1, 0, ((0, 10, 15), (1, 0, 5)))
    used: EpochRows = {0: {0: ((0, 10),), 1: ((0, 7),)}, 1: {0: ((2, 4), (6, 8)), 9: ((0, 1),)}}
    assert provenance.rows(used) == {0: {0: ((0, 15),), 1: ((0, 2),)}, 1: {0: ((2, 4), (6, 8))}}
    assert provenance.rows({}, dropped_to=0) == {0: {0: ((0, 15),), 1: ((0, 5),)}}


def test_provenance_stays_until_the_last_epoch_that_reads_the_segment_is_forgotten() -> None:
    provenance = Provenance()
    provenance.add(0, 0, ((0, 0, 10),))
    provenance.settle(2)  # epochs 0 to 2 read it
    provenance.add(1, 3, ((0, 10, 20),))
    provenance.forget(2)
    everything: EpochRows = {2: {0: ((0, 1),)}, 3: {1: ((0, 1),)}}
    assert provenance.rows(everything) == {2: {0: ((0, 1),)}, 3: {0: ((10, 11),)}}
    provenance.forget(3)
    assert provenance.rows(everything) == {3: {0: ((10, 11),)}}
