"""What an element of a dataset is."""

from __future__ import annotations

from typing import Any

import pytest

from sparkdl.feed.reader.batches import Names, arrange

COLUMNS = {"a": 1, "b": 2, "c": 3}
WEIGHTED = {**COLUMNS, "sample_weight": 0}


@pytest.mark.parametrize(
    ("columns", "x", "y", "element"),
    [
        (COLUMNS, None, None, COLUMNS),
        (COLUMNS, "a", None, 1),
        (COLUMNS, "a", "c", (1, 3)),
        (COLUMNS, ["a", "b"], "c", ({"a": 1, "b": 2}, 3)),
        (COLUMNS, "a", ["b", "c"], (1, {"b": 2, "c": 3})),
        (WEIGHTED, None, None, WEIGHTED),
        (WEIGHTED, "a", None, (1, 0)),
        (WEIGHTED, "a", "b", (1, 2, 0)),
        (WEIGHTED, ["a", "sample_weight"], "b", ({"a": 1, "sample_weight": 0}, 2)),
    ],
)
def test_element_is_what_was_named(
    columns: dict[str, Any], x: Names | None, y: Names | None, element: Any
) -> None:
    assert arrange(columns, x, y) == element
