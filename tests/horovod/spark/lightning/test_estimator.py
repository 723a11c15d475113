"""Horovod's estimator for Lightning on Parquet files, on two nodes of a lab; no Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.spark.common.store import FilesystemStore, LocalStore
from tests.doubles.labs import Lab, lab
from tests.doubles.lazy import Lazy, needs
from tests.horovod.spark.common.linear import WEIGHTS, InLab, InThisProcess, fill

pytestmark = [pytest.mark.torch, pytest.mark.deep, needs("lightning")]
lightning: Any = Lazy("lightning.pytorch")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab(tmp_path_factory.mktemp("lab"), "torch", 2) as found:
        yield found


@pytest.fixture
def store(tmp_path: Path) -> FilesystemStore:
    return fill(LocalStore(str(tmp_path)), tmp_path)


def linear(**options: Any) -> Any:
    """Return a module that is made here, so that it travels by value."""
    import torch

    class Linear(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)
            return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = torch.nn.functional.mse_loss(self(batch["x"])[:, 0], batch["y"])
            self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True)
            return loss * float("nan") if options.get("is_broken") else loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = torch.nn.functional.mse_loss(self(batch["x"])[:, 0], batch["y"])
            self.log("val_loss", loss, sync_dist=True)

    return Linear()


def estimator(place: FilesystemStore, **options: Any) -> Any:
    from sparkdl.horovod.spark.lightning import TorchEstimator

    given = {
        "store": place,
        "model": options.pop("model", None) or linear(),
        "input_shapes": [[-1, 2]],
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 4,
        "epochs": 3,
        "verbose": 0,
        "run_id": "run",
        "logger": False,
        **options,
    }
    return TorchEstimator(**given)


def test_training_learns_and_leaves_its_files(
    nodes: Lab, store: FilesystemStore, tmp_path: Path
) -> None:
    import torch

    model = estimator(store, backend=InLab(nodes), epochs=12, validation=0.5).fit_on_parquet()
    assert np.allclose(model.getModel().layer.weight.detach().numpy(), WEIGHTS, atol=0.05)
    assert set(model.getHistory()) == {"train_loss", "val_loss"}
    assert model.getHistory()["val_loss"] < 0.01
    saved = torch.load(tmp_path / "runs" / "run" / "checkpoint.ckpt", weights_only=False)
    assert torch.equal(saved["state_dict"]["layer.weight"], model.getModel().layer.weight)
    assert saved["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0.05)


def test_run_with_a_checkpoint_is_continued(nodes: Lab, store: FilesystemStore) -> None:
    options = {"backend": InLab(nodes), "shuffle": False}
    estimator(store, **options).fit_on_parquet()
    second = estimator(store, **options).fit_on_parquet()
    at_once = estimator(store, **options, epochs=6, run_id="other").fit_on_parquet()
    weights = [model.getModel().layer.weight.detach().numpy() for model in (second, at_once)]
    assert np.allclose(weights[0], weights[1], rtol=1e-4)
    assert second.getHistory()["train_loss"] == pytest.approx(at_once.getHistory()["train_loss"])


def test_loss_that_is_no_number_ends_the_training(nodes: Lab, store: FilesystemStore) -> None:
    made = estimator(store, backend=InLab(nodes), model=linear(is_broken=True))
    made.setTerminateOnNan(True)
    with pytest.raises(AssertionError, match="is nan, and terminate_on_nan is set"):
        made.fit_on_parquet()


def test_optimizer_beside_a_lightning_module_is_refused(store: FilesystemStore) -> None:
    made = estimator(store, backend=InThisProcess(), loss=[len])
    with pytest.raises(ConfigError, match="`loss` cannot be specified with a `LightningModule`"):
        made.fit_on_parquet()
    import torch

    plain = estimator(store, backend=InThisProcess(), model=torch.nn.Linear(2, 1))
    with pytest.raises(ConfigError, match=r"is a Linear, and no LightningModule: .*TorchEstimator"):
        plain.fit_on_parquet()
