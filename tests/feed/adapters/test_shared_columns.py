"""Columns in an anonymous memory file."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from sparkdl.core.errors import FeedTimeoutError, FeedTypeError, SparkdlError
from sparkdl.feed.adapters.torch_workers import Plain, pack, pack_failure, unpack, unpack_failure


def there_and_back(columns: Plain) -> dict[str, Any]:
    fd, at = pack(columns)
    try:
        return unpack(fd, at)
    finally:
        os.close(fd)


@pytest.mark.parametrize("dtype", ["?", "i1", "<u2", "<i8", "<f2", "<f4", "<c16"])
@pytest.mark.parametrize("shape", [(3,), (3, 5), (0,), (2, 0, 4)])
def test_arrays_arrive_as_they_were(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    arrived = there_and_back({"a": np.zeros(1, np.int8), "b": array})["b"]
    assert arrived.dtype == array.dtype
    np.testing.assert_array_equal(arrived, array)


def test_lists_arrive_as_they_were() -> None:
    strings = ["ä", None, b"\xff", ""]
    assert there_and_back({"a": strings, "b": []}) == {"a": strings, "b": []}
    assert there_and_back({}) == {}


def test_views_with_gaps_are_packed_without_them() -> None:
    array = np.arange(12).reshape(3, 4)[:, ::2]
    np.testing.assert_array_equal(there_and_back({"a": array})["a"], array)


def test_what_is_written_to_a_mapped_array_is_seen_by_nobody_else() -> None:
    fd, at = pack({"a": np.zeros(4)})
    try:
        mine = unpack(fd, at)["a"]
        assert isinstance(mine, np.ndarray)
        mine[:] = 1
        np.testing.assert_array_equal(unpack(fd, at)["a"], np.zeros(4))
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (FeedTypeError("column 'a'"), FeedTypeError, "^column 'a'$"),
        (FeedTimeoutError("no row"), FeedTimeoutError, "^no row$"),
        (KeyError("a"), SparkdlError, "^KeyError: 'a'$"),
    ],
)
def test_errors_arrive_with_their_type(error: Exception, kind: type, words: str) -> None:
    fd, at = pack_failure(error)
    with pytest.raises(kind, match=words):
        raise unpack_failure(fd, at)
    os.close(fd)
