"""Horovod's parameters: by keyword, with its setters and getters."""

from __future__ import annotations

import pytest

from sparkdl.horovod.spark.common.params import EstimatorParams, ModelParams


def test_parameters_have_horovods_defaults() -> None:
    params = EstimatorParams()
    found = params.getBatchSize(), params.getEpochs(), params.getVerbose(), params.getShuffle()
    assert found == (32, 1, 1, True)
    assert params.getTrainReaderNumWorker() is None
    params = EstimatorParams(batch_size=4, feature_cols=["a"], shuffle_buffer_size=0)
    assert (params.getBatchSize(), params.getFeatureCols()) == (4, ["a"])
    assert params.getShufflingBufferSize() == 0


def test_unknown_parameter_is_refused_with_the_nearest_name_and_a_wrong_type_by_name() -> None:
    with pytest.raises(TypeError, match=r"no parameter 'batchsize'.*batch_size"):
        EstimatorParams(batchsize=4)
    with pytest.raises(TypeError, match="batch_size"):
        EstimatorParams(batch_size="many")


def test_output_columns_are_named_after_the_labels() -> None:
    model = ModelParams(label_columns=["y", "z"])
    assert model.getOutputCols() == ["y__output", "z__output"]
    assert model.setOutputCols(["a", "b"]).getOutputCols() == ["a", "b"]
