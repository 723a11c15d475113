"""Keras under Horovod's faces on two nodes: plain `fit`, as one process with larger batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.doubles.nodes import launch
from tests.horovod.keras_programs import STEPS, keras_3, tf_keras

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
pytestmark = [pytest.mark.tensorflow, pytest.mark.torch, pytest.mark.timeout(300)]

DONE_S = 250.0
_PROGRAMS: dict[str, Callable[..., Any]] = {"keras": keras_3, "tf_keras": tf_keras}


@pytest.fixture(scope="module", params=["keras", "tf_keras"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: Any) -> list[dict[str, Any]]:
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    args = {"folder": str(tmp_path_factory.mktemp(request.param))}
    with launch(_PROGRAMS[request.param], args, input_mode="own") as cluster:
        found: list[dict[str, Any]] = cluster.results(DONE_S)
    assert [each["module"] for each in found] == [request.param] * 2
    return found


def test_fit_on_two_nodes_equals_fit_in_one_process(ranks: list[dict[str, Any]]) -> None:
    for name in ranks[0]["fits"]:
        first, second = (found["fits"][name] for found in ranks)
        np.testing.assert_array_equal(first["weights"], second["weights"], name)
        noise = 1e-3 if name == "half" else 1e-6
        np.testing.assert_allclose(first["weights"], first["alone"], atol=noise, err_msg=name)
        assert first["steps"] == 2 * STEPS, name


def test_local_layers_keep_their_gradients(ranks: list[dict[str, Any]]) -> None:
    assert [found["local"] for found in ranks] == [[-1.5, -0.5], [-1.5, -1.0]]


def test_broadcast_leaves_local_variables_alone(ranks: list[dict[str, Any]]) -> None:
    assert [found["own"] for found in ranks] == [[[rank, 1.0]] * 2 for rank in (0.0, 1.0)]


def test_metrics_are_averaged(ranks: list[dict[str, Any]]) -> None:
    first, second = (found["advanced"] for found in ranks)
    assert first["history"] == second["history"]
    assert set(first["history"]) == {"loss", "mae", "lr"}


def test_learning_rate_warms_up_and_decays(ranks: list[dict[str, Any]]) -> None:
    steps = np.arange(1, 9) / 4  # four batches an epoch, warm-up over two epochs
    warm = 0.1 / 2 * (steps / 2 + 1)
    wanted = [*warm, *[0.1] * 4, *[0.01] * 4]
    for found in ranks:
        np.testing.assert_allclose(found["advanced"]["rates"], wanted, rtol=1e-6)


def test_model_that_is_loaded_goes_on_together(ranks: list[dict[str, Any]]) -> None:
    first, second = (found["advanced"] for found in ranks)
    np.testing.assert_array_equal(first["weights"], second["weights"])
    np.testing.assert_array_equal(first["loaded"], second["loaded"])
    assert first["steps"] in (4, 8, 12, 16)  # after the best epoch
    assert first["loaded_as"] == "SGD"


def test_saved_model_needs_no_sparkdl(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["advanced"]["stock"] == [found["module"], False]


_REFUSED = {
    "twice": "is a DistributedOptimizer already",
    "passes": "backward_passes_per_step=0",
    "initial_lr": "needs initial_lr",
    "steps": "give it steps_per_epoch",
    "path": "has no filepath",
    "local": "'kernel' is no variable",
}


def test_what_cannot_be_is_refused_by_name(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        refused = found["refused"]
        assert {what: text for what, text in _REFUSED.items() if text not in refused[what]} == {}


def test_keras_3_keeps_the_model_out_of_xla(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found.get("jit", [True, False]) == [True, False]


def test_momentum_is_corrected_where_it_can_be(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        wanted = [0.5, 0.5, 0.25, 0.5]  # the rate halves at the first batch of the second epoch
        np.testing.assert_allclose(found.get("corrected", wanted), wanted)
