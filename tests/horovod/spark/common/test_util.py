"""Shapes of columns and of models, and values for each output; without Spark."""

from __future__ import annotations

import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.spark.common import util

SIZES = {"a": 1, "b": 12, "y": 1, "e": 12, "unknown": None}
METADATA = {name: {"shape": size} for name, size in SIZES.items()}


@pytest.mark.parametrize(
    ("inputs", "outputs", "labels"),
    [
        ([[1], [-1, 3, 4]], [[1], [-1, 3, 4]], None),
        ([[1], [3, 2, 2]], [[1, 1], [-1, 2, 3, 2]], None),
        ([[-1, -1], [-1, 12]], [[7], [7]], [[1], [-1, 3, 4]]),
        (None, None, None),
    ],
)
def test_shapes_that_fit(
    inputs: list[list[int]], outputs: list[list[int]], labels: list[list[int]]
) -> None:
    util.check_shape_compatibility(METADATA, ["a", "b"], ["y", "e"], inputs, outputs, labels)
    util.check_shape_compatibility(METADATA, ["unknown"], ["y"], [[-1, 7]])


@pytest.mark.parametrize(
    ("inputs", "outputs", "labels", "text"),
    [
        ([[1], [-1, 3, 5]], None, None, "Feature column 'b' with size 12 must equal .* size 15"),
        ([[1]], None, None, "Feature column count 2 must equal model inputs count 1"),
        (None, [[7], [-1, 12]], None, "Label column 'y' with size 1 must equal that of the model"),
        (None, [[1]], None, "Label column count 2 must equal model outputs count 1"),
        (None, None, [[12]], "Label column count 2 must equal label shapes count 1"),
    ],
)
def test_shapes_that_do_not_fit(
    inputs: list[list[int]], outputs: list[list[int]], labels: list[list[int]], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        util.check_shape_compatibility(METADATA, ["a", "b"], ["y", "e"], inputs, outputs, labels)


def test_one_value_is_for_all_outputs() -> None:
    assert util.to_list(None, 2) is None
    assert util.to_list("x", 2) == ["x", "x"]
    assert util.to_list(["x"], 2) == ["x", "x"]
    assert util.to_list(["x", "y"], 2) == ["x", "y"]
    with pytest.raises(ConfigError, match="must be length 3"):
        util.to_list(["x", "y"], 3)


def test_dataset_that_nobody_wrote_is_named() -> None:
    with pytest.raises(ConfigError, match="dataset_idx=7: no dataset was written with this index"):
        util.get_dataset_properties(7)
