"""The parameters of estimators as types, for their constructors.

Runs in: anywhere

Type checkers and editors alone read them. The fields are those of the table in `params.py`, written
by `python -m scripts.options`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sparkdl.core.options import Feeding, Recovery, Startup
    from sparkdl.driver.options import Observe


class NetworkParams(TypedDict, total=False):
    """The parameters of all estimators of networks by name."""

    batch_size: int
    cache: bool
    checkpoint_dir: str | None
    early_stopping_min_delta: float
    early_stopping_monitor: str | None
    early_stopping_patience: int | None
    epochs: int
    features_col: str | Sequence[str]
    feed_reader: Literal["auto", "spark", "nodes"]
    feeding: Feeding | None
    handle_invalid: Literal["error", "skip", "keep"]
    input_mapping: Mapping[str, Any]
    keep: bool | Sequence[str]
    label_col: str | Sequence[str] | Mapping[str, str]
    max_restarts: int
    model_dir: str | None
    model_per: Literal["auto", "slot", "executor"]
    num_gpus: int | None
    num_workers: int
    observe: Observe | None
    output_mapping: Mapping[str, Any]
    output_types: Mapping[str, Any]
    prediction_col: str
    probability_col: str | None
    raw_prediction_col: str | None
    recovery: Recovery | None
    seed: int | None
    shuffle: bool
    shutdown_timeout: float
    startup: Startup | None
    tensorboard_dir: str | None
    validation_indicator_col: str | None
    validation_split: float
    verbose: int
    weight_col: str | None


class KerasParams(NetworkParams, total=False):
    """The further parameters of `KerasEstimator`."""

    class_weight: Mapping[int, float]
    learning_rate: float | None
    loss: Any
    loss_weights: Any
    metrics: Any
    mode: Literal["nodes", "jobs"]
    optimizer: Any


class LightningParams(NetworkParams, total=False):
    """The further parameters of `LightningEstimator`."""

    input_shapes: Mapping[str, Any]
    strategy: Literal["ddp", "ddp_find_unused_parameters_true", "fsdp"]
    trainer_args: Mapping[str, Any]


class TorchParams(NetworkParams, total=False):
    """The further parameters of `TorchEstimator`."""

    input_shapes: Mapping[str, Any]
    learning_rate: float | None
    loss: Any
    metrics: Any
    optimizer: Any
    optimizer_args: Mapping[str, Any]
    strategy: Literal["ddp", "ddp_find_unused_parameters_true", "fsdp"]
