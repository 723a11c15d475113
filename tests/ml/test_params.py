"""Parameters: setters and getters from the table, arguments merged, wrong values refused."""

from __future__ import annotations

import argparse
import inspect
import json
from dataclasses import asdict
from typing import Any

import pytest
from pyspark.ml.tuning import ParamGridBuilder

from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Feeding, Recovery, Startup
from sparkdl.driver.launch import launch
from sparkdl.driver.options import Observe
from sparkdl.ml.estimators.estimator import TFEstimator, launch_options
from sparkdl.ml.namespace import Namespace
from sparkdl.ml.params import TABLE
from sparkdl.ml.scoring.model import KerasModel, TFModel, TorchModel

# TensorFlowOnSpark 2.2.5's, from the constructors of its TFEstimator and TFModel
OTHER = {
    "input_mapping": {"a": "b"}, "output_mapping": {"c": "d"}, "driver_ps_nodes": True,
    "input_mode": 1, "master_node": "master", "protocol": "rdma", "tensorboard": True,
}  # fmt: skip


def train_fn(args: Any, ctx: Any) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    "stage", [TFEstimator(train_fn, {}), TFModel({}), KerasModel(), TorchModel()]
)
def test_every_parameter_has_a_setter_that_chains_and_a_getter(stage: Any) -> None:
    for param in stage.params:
        row = TABLE[param.name]
        value = OTHER.get(param.name, row.default if row.default is not None else None)
        assert getattr(stage, f"set{row.accessor}")(value) is stage
        assert getattr(stage, f"get{row.accessor}")() == value
        assert row.doc in stage.explainParam(param)


def test_set_parameters_beat_arguments_which_beat_defaults() -> None:
    args = argparse.Namespace(batch_size=64, epochs=5, mine="x", steps=None)
    estimator = TFEstimator(train_fn, args).setEpochs(7)
    found: Any = estimator.merge_args_params()
    assert (found.batch_size, found.epochs, found.mine, found.steps) == (64, 7, "x", 1000)
    assert found.cluster_size == 1
    words = ["--lr", "1"]
    assert list(TFEstimator(train_fn, words).setEpochs(2).merge_args_params()) == words
    assert (args.batch_size, args.epochs, vars(estimator.args).get("cluster_size")) == (64, 5, None)


def test_what_concerns_the_launch_reaches_it() -> None:
    detached, patient = Startup(placement="detached"), Feeding(timeout_s=5.0)
    stage = TFEstimator(train_fn, {"num_gpus": 2, "startup": detached})
    found = launch_options(stage.setFeeding(patient).setNumGPUs(3).merge_args_params())
    assert found == {"num_gpus": 3, "max_restarts": 0, "startup": detached, "feeding": patient}
    assert found.keys() <= inspect.signature(launch).parameters.keys()


@pytest.mark.parametrize(
    "value",
    [
        Recovery(min_nodes=2, on_hang="fail", hang_timeout_s=None),
        Feeding(timeout_s=5.0, disk_nbytes=0),
        Observe(log_to_driver=True, tensorboard="/logs"),
        Startup(preload=["json"], tls=True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_option_objects_of_a_saved_stage_are_those_that_were_set(value: Any) -> None:
    row = TABLE[type(value).__name__.lower()]
    assert row.convert(json.loads(json.dumps(asdict(value)))) == row.convert(value) == value
    with pytest.raises(TypeError, match=f"to a sparkdl.{type(value).__name__}"):
        row.convert(3)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"a": 1}, ["a"]),
        (argparse.Namespace(a=1), ["a"]),
        (Namespace({"a": 1}), ["a"]),
        (["a", "b"], ["a", "b"]),
        (None, []),
    ],
)
def test_namespace_of(given: Any, names: list[str]) -> None:
    found = Namespace(given)
    assert list(found) == names
    assert all(name in found for name in names)
    assert found == Namespace(given)
    assert found != Namespace({"other": 1})


def test_namespace_of_anything_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="tf_args is a int"):
        Namespace(7)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("BatchSize", 0, "(?m)^batch_size=0 must be at least 1$"),
        ("InputMode", 0, "^input_mode=0 cannot be: .* only InputMode.SPARK"),
        (
            "Feeding",
            {"timeout_s": -1},
            "^feeding=.* Feeding.timeout_s=-1. must be above zero seconds",
        ),
        ("HandleInvalid", "Keep", "^handle_invalid='Keep' cannot be: .*; did you mean 'keep'"),
    ],
)
def test_values_that_cannot_work_are_refused(name: str, value: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        getattr(TFEstimator(train_fn, {}), f"set{name}")(value)


@pytest.mark.parametrize(("name", "value"), [("InputMapping", ["a"]), ("Epochs", "two")])
def test_values_of_another_type_are_refused_as_spark_ml_does(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match="Invalid param value given for param"):
        getattr(TFEstimator(train_fn, {}), f"set{name}")(value)


def test_copies_are_independent_and_grids_apply() -> None:
    estimator = TFEstimator(train_fn, {"mine": 1}).setEpochs(2)
    (grid,) = ParamGridBuilder().addGrid(estimator.epochs, [9]).build()
    copy = estimator.copy(grid)
    assert (copy.getEpochs(), estimator.getEpochs(), copy.args) == (9, 2, estimator.args)
    assert copy.setBatchSize(3).uid == estimator.uid
    assert estimator.getBatchSize() == 100


def test_export_fn_is_refused_before_the_training() -> None:
    with pytest.raises(ConfigError, match="save the model at the end of train_fn"):
        TFEstimator(train_fn, {}, export_fn=train_fn)
