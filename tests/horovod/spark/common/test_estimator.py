"""`transformation_fn` of Horovod's estimators; no Spark."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from sparkdl.horovod.spark.common.estimator import Transformation


def frame_of(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"a": [1, 2, 3], "x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], **columns})


def test_function_gets_arrays_and_numbers_keep_their_types() -> None:
    def function(rows: Any) -> Any:
        assert isinstance(rows["x"].iloc[0], np.ndarray)
        return {"a": rows["a"].astype("int32"), "z": np.stack(rows["x"].tolist()) * 2}

    (found,) = Transformation(function)(iter([frame_of(), frame_of().head(0)]))
    assert found["a"].dtype == np.int32
    assert found["z"].tolist() == [[2.0, 4.0], [6.0, 8.0], [10.0, 12.0]]


def test_rows_stay_what_they_are_marked_as_though_the_function_returns_others() -> None:
    def function(rows: Any) -> Any:
        assert "sparkdl_validates" not in rows
        return pd.concat([rows[["a"]], rows[["a"]]])  # without an index of its own

    frame = frame_of(sparkdl_validates=[False, True, False])
    (found,) = Transformation(function, is_marked=True)(iter([frame]))
    assert found["a"].tolist() == [1, 3, 1, 3, 2, 2]
    assert found["sparkdl_validates"].tolist() == [False] * 4 + [True] * 2
