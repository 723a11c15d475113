"""`transformation_fn` of Horovod's estimators; no Spark."""

from __future__ import annotations

from typing import Any

import pandas as pd

from sparkdl.horovod.spark.common.estimator import Transformation


def frame_of(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"a": [1, 2, 3], "x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], **columns})


def test_rows_stay_what_they_are_marked_as_though_the_function_returns_others() -> None:
    def function(rows: Any) -> Any:
        assert "sparkdl_validates" not in rows
        return pd.concat([rows[["a"]], rows[["a"]]])  # without an index of its own

    frame = frame_of(sparkdl_validates=[False, True, False])
    (found,) = Transformation(function, is_marked=True)(iter([frame]))
    assert found["a"].tolist() == [1, 3, 1, 3, 2, 2]
    assert found["sparkdl_validates"].tolist() == [False] * 4 + [True] * 2
