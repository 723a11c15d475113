"""Keras 3 on two real workers: what the shim promises, and that stock Keras does not do it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.pairs import run_alone, run_pair

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(400)]

_NOISE = 1e-5


Results = list[dict[str, Any]]
"""Those of the chief and of the worker."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """What the programs gave that one pair of processes ran, one after the other."""
    programs = ("keras_stock", "keras_trains", "keras_saves")
    return run_pair(programs, tmp_path_factory.mktemp("pair"))


@pytest.fixture
def trained(pair: dict[str, Results]) -> Results:
    return pair["keras_trains"]


@pytest.fixture
def saved(pair: dict[str, Results]) -> Results:
    return pair["keras_saves"]


@pytest.mark.parametrize("case", ["arrays", "weighted", "dicts", "stream", "executions"])
def test_workers_end_with_the_same_weights_and_losses(trained: Results, case: str) -> None:
    chief, worker = (result[case] for result in trained)
    assert chief["weights"] == worker["weights"]
    assert chief.get("history") == worker.get("history")


@pytest.mark.parametrize("case", ["arrays", "weighted"])
def test_two_workers_train_as_one_process_with_the_global_batch(
    trained: Results, case: str
) -> None:
    for result in trained:
        found = result[case]
        assert found["weights"] == pytest.approx(found["expected_weights"], abs=_NOISE)


def test_metrics_and_validation_are_those_of_all_rows(trained: Results) -> None:
    for result in trained:
        found = result["arrays"]
        assert set(found["history"]) >= {"loss", "AUC", "val_loss", "val_accuracy", "val_AUC"}
        for name, values in found["expected_history"].items():
            assert found["history"][name] == pytest.approx(values, abs=_NOISE), name


def test_evaluate_gives_every_worker_the_value_for_all_rows(
    trained: Results,
) -> None:
    chief, worker = (result["arrays"] for result in trained)
    assert chief["evaluate"] == worker["evaluate"]
    assert chief["evaluate"] == pytest.approx(chief["expected_evaluate"], abs=_NOISE)


def test_building_the_model_takes_no_row_from_the_data(trained: Results) -> None:
    assert [(r["stream"]["starts"], r["stream"]["seen"]) for r in trained] == [(1, 32)] * 2


@pytest.mark.parametrize("case", ["outside", "within", "on_batch", "alone", "distributed"])
def test_predict_gives_each_worker_the_predictions_for_its_rows(
    trained: Results, case: str
) -> None:
    assert [result["predict"][case] < _NOISE for result in trained] == [True, True]


def test_predict_leaves_the_model_under_its_strategy(trained: Results) -> None:
    chief, worker = (result["predict"] for result in trained)
    assert chief["strategy_kept"]
    assert chief["lazy_weights"] == worker["lazy_weights"] != []


def test_several_steps_per_execution_are_taken_as_one(trained: Results) -> None:
    assert all(result["executions"]["error"] < _NOISE for result in trained)


def test_model_without_strategy_trains_beside_a_cluster(trained: Results) -> None:
    assert [result["untouched"]["rows"] for result in trained] == [5, 5]


def test_only_the_chief_saves(saved: Results) -> None:
    chief, worker = (result["saves"] for result in saved)
    assert chief["files"] == [
        "exported",
        "function.keras",
        "legacy.h5",
        "method.keras",
        "only.weights.h5",
    ]
    assert chief["loaded"] < _NOISE
    assert worker["files"] == []


def test_only_the_chief_writes_checkpoints(saved: Results) -> None:
    chief, worker = (result["checkpoints"] for result in saved)
    assert chief["own"] == ["1.keras", "2.keras"]
    assert worker["own"] == []
    assert chief["shared"] == worker["shared"] == ["best.weights.h5"]
    assert worker["path_kept"]


def test_workers_resume_together_from_the_backup_of_the_chief(
    saved: Results,
) -> None:
    for result in saved:
        found = result["resumes"]
        assert found["epochs"] == [2, 3]
        assert found["weights"] == pytest.approx(found["expected_weights"], abs=_NOISE)
        assert not found["left"]


def test_backup_that_only_the_chief_can_read_is_an_error_on_every_worker(
    saved: Results,
) -> None:
    for result in saved:
        assert "different epochs [2, 0]" in result["apart"]["error"]
        assert "backup_dir" in result["apart"]["error"]


def test_private_files_are_deleted(saved: Results) -> None:
    assert [result["left"] for result in saved] == [[], []]


def test_stock_keras_fails_with_two_workers(pair: dict[str, Results]) -> None:
    """Once this fails, Keras trains on several workers by itself: shrink the shim."""
    assert all("PerReplica" in str(result["error"]) for result in pair["keras_stock"])


def test_tf_keras_trains_on_two_workers(tmp_path: Path) -> None:
    pytest.importorskip("tf_keras", reason="tf_keras is not installed")
    program = "tf_keras_trains"
    chief, worker = run_pair([program], tmp_path, TF_USE_LEGACY_KERAS="1")[program]
    assert chief["module"].startswith("tf_keras.")
    assert chief == worker


@pytest.mark.parametrize("strategy", ["none", "mirrored"])
def test_shim_changes_nothing_on_one_node(alone: dict[str, Results], strategy: str) -> None:
    stock, shimmed = alone[strategy]
    assert stock == shimmed
    assert stock["saved"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_alone("keras_alone", tmp_path_factory.mktemp("alone"))
