"""What `LightningEstimator` checks and hands to Lightning, without nodes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.columns import Columns
from sparkdl.ml.estimators.torch_train import ModuleTask, check_trainer_args, train
from tests.doubles.lazy import Lazy
from tests.ml.torch_fits import Alone, X, Y, line, net

torch: Any = Lazy("torch")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("lone_node")]

lightning = pytest.mark.skipif(not find_spec("lightning"), reason="Lightning is not installed")
its_warnings = pytest.mark.filterwarnings("ignore")


def fit(trainer_args: dict[str, Any], ctx: Any, **fields: Any) -> dict[str, Any]:
    columns = Columns({"x": ""}, {"y": ""})
    given = {"made": line, "batch_size": 4, "epochs": 4, "seed": 1, "validates": True, **fields}
    args = {"accelerator": "cpu", **trainer_args}
    return train(ModuleTask(columns=columns, name="fit", trainer_args=args, **given), ctx)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"num_sanity_val_steps": -1}, "num_sanity_val_steps=-1: the rows to validate with are"),
        ({"limit_train_batches": 1}, "limit_train_batches=1: an epoch is one pass"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs=1: the load"),
        ({"num_nodes": 2}, "num_nodes=2: set num_workers"),
        ({"callbacks": []}, "callbacks=.*: set callbacks of the estimator"),
    ],
)
def test_argument_that_changes_how_often_rows_are_read_is_refused(given: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        check_trainer_args(given)


def test_module_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="a Sequential, and must be a LightningModule; use Torch"):
        fit({}, Alone(x=X, y=Y), made=net)


def test_callbacks_that_read_rows_are_refused() -> None:
    finder = type("BatchSizeFinder", (), {})()
    with pytest.raises(ConfigError, match="a BatchSizeFinder, which reads rows outside"):
        check_trainer_args({}, [finder])


@lightning
def test_checkpoint_that_a_restart_would_not_find_is_refused() -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    with pytest.raises(ConfigError, match="a ModelCheckpoint without a dirpath"):
        fit({}, Alone(x=X, y=Y), callbacks=[ModelCheckpoint()], saves=True)


@lightning
@its_warnings
def test_epochs_that_were_not_validated_have_no_value() -> None:
    ctx = Alone(x=X[:4], y=Y[:4])
    args = {"check_val_every_n_epoch": 2, "enable_checkpointing": False}
    history = fit(args, ctx)["history"]
    assert [value is None for value in history["val_loss"]] == [True, False, True, False]
    assert {len(values) for values in history.values()} == {4}
    assert ctx.passes == {"input": 4, "validation": 2}
