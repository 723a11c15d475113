"""The axes of a mesh, and who holds the same rows."""

from __future__ import annotations

import numpy as np
import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.datasets.mesh import axis_sizes, same_rows

NODES = "nodes that train"


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        ({"data": 2, "model": 4}, {"data": 2, "model": 4}),
        ({"data": -1, "model": 4}, {"data": 2, "model": 4}),
        ({"data": 8, "model": -1}, {"data": 8, "model": 1}),
        ({"data": 8}, {"data": 8}),
    ],
)
def test_axis_of_minus_one_takes_what_is_left(asked: dict[str, int], sizes: dict[str, int]) -> None:
    assert axis_sizes(asked, 8, NODES) == sizes


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"data": 3, "model": 2}, r"mesh\(data=3, model=2\) has 6 places, and there are 8 nodes"),
        ({"data": -1, "model": 3}, "8 nodes that train cannot be divided by 3, so data has no"),
        ({"data": -1, "model": -1}, "only one axis can be -1"),
        ({"data": 0, "model": 8}, "must be 1 or more"),
        ({"data": 4.0, "model": 2}, "must be 1 or more"),
        ({"data": True}, "must be 1 or more"),
        ({}, "needs axes"),
    ],
)
def test_axes_that_do_not_fit_say_the_numbers(asked: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        axis_sizes(asked, 8, NODES)


def test_nodes_that_differ_in_no_data_axis_hold_the_same_rows() -> None:
    ranks = np.arange(8).reshape(2, 2, 2)
    names = ("replica", "shard", "model")
    assert same_rows(ranks, names, ["replica", "shard"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert same_rows(ranks, names, ["replica"]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert same_rows(ranks, names, ["model"]) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert same_rows(ranks, names, []) == [list(range(8))]
    with pytest.raises(ConfigError, match="no axis 'data'; it has replica, shard, model"):
        same_rows(ranks, names, ["data"])
