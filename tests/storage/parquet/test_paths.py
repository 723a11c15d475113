"""Parquet files as users name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.storage.parquet.paths import ParquetPaths, parquet, parquet_paths


@pytest.mark.parametrize(
    ("data", "paths"),
    [
        ("a/*.parquet", ("a/*.parquet",)),
        (Path("a"), ("a",)),
        (["s3://b/a", Path("c")], ("s3://b/a", "c")),
        (("a", "b"), ("a", "b")),
    ],
)
def test_text_and_paths_and_lists_of_them_are_paths(data: Any, paths: tuple[str, ...]) -> None:
    assert parquet_paths(data) == ParquetPaths(paths)
    assert parquet(data, ["x"]) == ParquetPaths(paths, ("x",))


@pytest.mark.parametrize("data", [[], (), [1], ["a", 1], b"a", {"a": 1}, range(3), None])
def test_anything_else_is_not(data: Any) -> None:
    assert parquet_paths(data) is None
    with pytest.raises(ConfigError, match="must be a path or a list of paths"):
        parquet(data)


def test_columns_are_a_list() -> None:
    with pytest.raises(ConfigError, match="columns='x' must be a list"):
        parquet("a", "x")


def test_options_are_not_shown() -> None:
    assert "hunter2" not in repr(parquet("s3://b/a", options={"secret_key": "hunter2"}))
