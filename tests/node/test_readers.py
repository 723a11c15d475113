"""Readers that user code asks for late are where those are that were there from the beginning."""

from __future__ import annotations

import pytest

from sparkdl.control.channel import EndMark, Local
from sparkdl.core.errors import FeedTypeError, ReadError
from sparkdl.node.link import FeedReaders


def test_end_of_all_feeds_reaches_late_readers_and_none_that_the_node_fills_itself() -> None:
    readers = FeedReaders(list[Local]().append)
    own = readers.own_files(None).reader
    readers.take(EndMark(""), -1)
    assert not readers.reader("late").has_epoch()
    own.fail(ReadError("no such file"))
    with pytest.raises(ReadError, match="no such file"):
        own.has_epoch()


def test_error_that_repeats_one_of_a_feed_is_that_one() -> None:
    readers = FeedReaders(list[Local]().append)
    found = readers.registry.raised = FeedTypeError("column 'c' holds 1 null")
    of_a_graph = ValueError(f"Graph execution error: FeedTypeError: {found}\nat PyFunc")
    assert readers.cause_of(of_a_graph) is found
    other = ValueError("Graph execution error: out of memory")
    assert readers.cause_of(other) is other
    assert readers.cause_of(found) is found
