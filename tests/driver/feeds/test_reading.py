"""What the driver tells nodes to read."""

from __future__ import annotations

from typing import Any

import pytest

from sparkdl.control.messages import ReadShare
from sparkdl.control.rows import DataFile, Share, Storage
from sparkdl.core.errors import ConfigError
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.driver.feeds.feeds import listed
from sparkdl.driver.feeds.transitions import _check_size

SPEC = ClusterSpec("c", plan_nodes(1))


def order_of(files: int) -> ReadShare:
    """Return an order to read so many files, whose names take 1 kB each."""
    named = tuple(DataFile("x" * 1000, 1) for _ in range(files))
    return ReadShare("input", 0, Share(Storage("file://"), b"", (), named, ()))


def test_share_that_is_too_large_for_a_message_says_what_to_do() -> None:
    _check_size(order_of(10_000))
    with pytest.raises(ConfigError, match=r"17000 files, takes .* Write fewer and larger files"):
        _check_size(order_of(17_000))


@pytest.mark.parametrize("data", [[1, 2], range(3), object(), iter(["a"])])
def test_what_names_no_files_is_left_as_it_is(data: Any) -> None:
    assert listed(data, SPEC) is data
