"""TensorFlowOnSpark's contract for `pipeline`, without Spark.

https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/pipeline.py
"""

from __future__ import annotations

import argparse

import pytest
from pyspark.ml.param import Params

from sparkdl.tfos import pipeline


@pytest.mark.parametrize("name", [name[3:] for name in pipeline.__all__ if name.startswith("Has")])
def test_mixins_have_their_accessors(name: str) -> None:
    mixin = getattr(pipeline, f"Has{name}")
    assert issubclass(mixin, Params)
    assert callable(getattr(mixin, f"set{name}"))
    assert callable(getattr(mixin, f"get{name}"))


def test_own_stages_of_the_mixins_work() -> None:
    class Own(
        pipeline.TFParams,
        pipeline.HasBatchSize,  # type: ignore[valid-type,misc]
        pipeline.HasNumPS,  # type: ignore[valid-type,misc]
    ):
        def __init__(self) -> None:
            super().__init__()
            self.args = pipeline.Namespace(argparse.Namespace(own=1))
            self._setDefault(batch_size=5, num_ps=0, driver_ps_nodes=False)

    merged = Own().setNumPS(2).merge_args_params()
    assert vars(merged) == {"own": 1, "batch_size": 5, "num_ps": 2, "driver_ps_nodes": False}
