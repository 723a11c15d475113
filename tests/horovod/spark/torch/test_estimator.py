"""`TorchEstimator` on Parquet files, in this process and in two others; no Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sparkdl.core.errors import ConfigError, NodeFailedError
from sparkdl.horovod.spark.common.backend import SparkBackend
from sparkdl.horovod.spark.common.store import FilesystemStore, LocalStore
from tests.horovod.spark.common.linear import WEIGHTS, InThisProcess, fill

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.torch


@pytest.fixture
def store(tmp_path: Path) -> FilesystemStore:
    return fill(LocalStore(str(tmp_path)), tmp_path)


def estimator(place: FilesystemStore, **options: Any) -> Any:
    import torch

    from sparkdl.horovod.spark.torch import TorchEstimator

    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    given = {
        "backend": InThisProcess(),
        "store": place,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
        "loss": torch.nn.MSELoss(),
        "input_shapes": [[-1, 2]],
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 3,
        "verbose": 0,
        "run_id": "run",
        "random_seed": 1,
        **options,
    }
    return TorchEstimator(**{name: value for name, value in given.items() if value is not None})


def losses(model: Any, part: str = "train") -> list[float]:
    return [epoch[part]["loss"] for epoch in model.getHistory()]


def test_training_learns_and_leaves_its_files(store: FilesystemStore, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    import torch

    def error(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output - label).abs().mean()

    model = estimator(store, epochs=12, validation=0.5, metrics=[[error]]).fit_on_parquet()
    assert np.allclose(model.getModel().weight.detach().numpy(), WEIGHTS, atol=0.05)
    assert losses(model)[-1] < 0.01 < losses(model)[0]
    last = model.getHistory()[-1]
    assert last["epoch"] == 11
    assert last["validation"]["loss"] < 0.01
    (measured,) = last["train"]["all_metrics"]
    assert 0 < measured["group_0_y"] < 0.1
    assert model.getRunId() == "run"
    assert not model.getModel().training
    saved = torch.load(tmp_path / "runs" / "run" / "checkpoint")
    assert saved["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.1)
    assert torch.equal(saved["model"]["weight"], model.getModel().weight)
    assert list((tmp_path / "runs" / "run" / "logs").glob("events.*"))
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]


def test_run_with_a_checkpoint_is_continued(store: FilesystemStore) -> None:
    first = estimator(store, shuffle=False).fit_on_parquet()
    second = estimator(store, shuffle=False).fit_on_parquet()
    at_once = estimator(store, shuffle=False, epochs=6, run_id="other").fit_on_parquet()
    assert [*losses(first), *losses(second)] == pytest.approx(losses(at_once))
    momentum = second.getOptimizer().state_dict()["state"][0]["momentum_buffer"]
    assert momentum.abs().sum() > 0


def test_store_may_be_on_any_storage_of_fsspec(tmp_path: Path) -> None:
    store = fill(FilesystemStore(f"memory://{tmp_path.name}"), tmp_path)
    first = estimator(store, validation=0.5).fit_on_parquet()
    second = estimator(store, validation=0.5).fit_on_parquet()
    assert losses(second, "validation")[-1] < losses(first, "validation")[-1]
    assert store.exists(f"{store.get_checkpoint_path('run')}/checkpoint")
    names = [path.rpartition("/")[2] for path in store.fs.ls(f"/{tmp_path.name}/runs", False)]
    assert names == ["run"]


@pytest.mark.deep
def test_two_processes_train_on_all_rows_together(store: FilesystemStore) -> None:
    backend = SparkBackend(2, verbose=0, executor="local")
    alone = estimator(store, shuffle=False, batch_size=8, sample_weight_col="w")
    both = estimator(store, shuffle=False, batch_size=4, sample_weight_col="w", run_id="both")
    both.setBackend(backend).setOptimizer(_slower(both.getModel()))
    one, two = alone.fit_on_parquet(), both.fit_on_parquet()
    assert len(two.getHistory()) == 3
    assert losses(two)[-1] < losses(two)[0]
    # The rate is multiplied by two, and each batch has other rows: near, not equal.
    assert losses(two) == pytest.approx(losses(one), rel=0.5, abs=0.05)
    (group,) = two.getOptimizer().param_groups
    assert group["lr"] == pytest.approx(0.05)


def _slower(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


@pytest.mark.deep
def test_failure_in_a_process_names_its_cause(store: FilesystemStore) -> None:
    def broken(output: Any, label: Any) -> Any:
        raise RuntimeError("no such loss")

    backend = SparkBackend(2, verbose=0, executor="local")
    with pytest.raises(NodeFailedError, match="no such loss"):
        estimator(store, backend=backend, loss=broken).fit_on_parquet()


def test_function_of_the_users_own_may_leave_the_last_step_open(store: FilesystemStore) -> None:
    steps: list[int] = []

    def lazily(
        model: Any, optimizer: Any, transform_outputs: Any, loss_fn: Any, inputs: Any, labels: Any,
        weights: Any, passes: int, index: int,
    ) -> tuple[Any, Any]:  # fmt: skip
        if index:
            optimizer.step()
        optimizer.zero_grad()
        outputs, labels = transform_outputs(model(*inputs), labels)
        loss = loss_fn(outputs, labels, weights)
        loss.backward()
        steps.append(index)
        return outputs, loss

    own = estimator(store, shuffle=False, train_minibatch_fn=lazily, run_id="a").fit_on_parquet()
    usual = estimator(store, shuffle=False, run_id="b").fit_on_parquet()
    assert losses(own) == pytest.approx(losses(usual))
    assert steps == [*range(5)] * 3


def test_gradients_of_several_batches_are_added_up(store: FilesystemStore) -> None:
    found = estimator(store, backward_passes_per_step=2, epochs=8).fit_on_parquet()
    assert losses(found)[-1] < losses(found)[0]


def test_losses_may_be_made_in_the_processes(store: FilesystemStore) -> None:
    import torch

    seen: list[str] = []

    def make(**given: Any) -> Any:
        seen.extend(given)
        return torch.nn.L1Loss()

    found = estimator(store, loss=None, loss_constructors=[make]).fit_on_parquet()
    assert "model" in seen
    assert losses(found)[-1] < losses(found)[0]


def test_parameter_groups_keep_their_rates(store: FilesystemStore) -> None:
    import torch

    made = estimator(store)
    weight, bias = made.getModel().parameters()
    groups = [{"params": [bias], "lr": 0.0}, {"params": [weight]}]
    made.setOptimizer(torch.optim.Adam(groups, lr=0.2))
    model = made.fit_on_parquet()
    assert torch.equal(model.getModel().bias, made.getModel().bias)
    assert not torch.equal(model.getModel().weight, made.getModel().weight)
    assert [group["lr"] for group in model.getOptimizer().param_groups] == [0.0, 0.2]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"store": None}, "store is not set"),
        ({"optimizer": None}, "optimizer is not set"),
        ({"loss": None}, "loss is not set"),
        ({"loss_weights": [1.0, 2.0]}, "loss_weights needs to be a list with the same length"),
        ({"num_proc": 2}, 'At most one of parameters "backend" and "num_proc"'),
        ({"feature_cols": ["q"]}, "no column 'q'"),
        (
            {"input_shapes": [[-1, 3]]},
            "Feature column 'x' with size 2 must equal that of the model",
        ),
        ({"input_shapes": [[-1, 2], [-1]]}, "column count 1 must equal model inputs count 2"),
        ({"mp_start_method": "fast"}, "mp_start_method='fast' must be one of"),
        ({"epochs": 0}, "epochs=0 must be at least 1"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    options: dict[str, Any], text: str, store: FilesystemStore
) -> None:
    with pytest.raises(ConfigError, match=text):
        estimator(store, **options).fit_on_parquet()


def test_parameter_that_is_not_used_is_no_secret(store: FilesystemStore) -> None:
    with pytest.warns(UserWarning, match="TorchEstimator does not use callbacks"):
        estimator(store, callbacks=[print], epochs=1).fit_on_parquet()


def test_runs_without_a_name_do_not_continue_each_other(store: FilesystemStore) -> None:
    first, second = (estimator(store, run_id=None).fit_on_parquet() for _ in range(2))
    assert first.getRunId() != second.getRunId()
    assert losses(first) == losses(second)


@pytest.mark.parametrize("name", ["loss", "optimizer", "feature_cols", "label_cols", "store"])
def test_what_is_missing_is_said_before_the_frame_is_written(
    name: str, store: FilesystemStore
) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not set"):
        estimator(store, **{name: None}).fit("no DataFrame")


def test_constructor_refuses_what_contradicts(store: FilesystemStore) -> None:
    with pytest.raises(ValueError, match="only one of loss_constructors and loss"):
        estimator(store, loss_constructors=[])
    with pytest.raises(ValueError, match="backward_passes_per_step must be > 0"):
        estimator(store, backward_passes_per_step=0)
