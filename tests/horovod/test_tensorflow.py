"""Horovod's faces for TensorFlow and Keras on two nodes do what its documentation says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparkdl.core.options import Feeding
from tests.doubles.labs import Lab, lab_of
from tests.horovod import tensorflow_programs
from tests.horovod.keras_programs import EPOCHS, STEPS, everything, goes_on_at_the_last_commit
from tests.horovod.together import together

pytestmark = [pytest.mark.tensorflow, pytest.mark.torch, pytest.mark.smoke]

_HOW: dict[str, Callable[[Any, Any], Any]] = {
    "Average": lambda a, b: (a + b) / 2,
    "Sum": np.add,
    "Min": np.minimum,
    "Max": np.maximum,
    "Product": np.multiply,
}


pair = lab_of("tensorflow", 2, feeding=Feeding(fed=False))


@pytest.fixture(scope="module")
def ranks(pair: Lab) -> list[dict[str, Any]]:
    return together(pair, tensorflow_programs.everything)


@pytest.fixture(scope="module")
def fitted(pair: Lab, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return together(pair, everything, tmp_path_factory.mktemp("keras"))


def both(ranks: list[dict[str, Any]], case: str) -> list[Any]:
    return [found[case] for found in ranks]


def test_every_type_is_reduced(ranks: list[dict[str, Any]]) -> None:
    given = [np.array([[rank + 1, 2, 3], [4, 5, 6]], np.float64) for rank in range(2)]
    for dtype, op in tensorflow_programs.KINDS:
        wanted = _HOW[op](*given)
        for found in both(ranks, "reduces_all_types"):
            for value in found[f"{dtype} {op}"]:
                exact = np.trunc(wanted) if "int" in dtype else wanted
                np.testing.assert_array_equal(value, exact, f"{dtype} {op}")


def test_rows_move_as_they_should(ranks: list[dict[str, Any]]) -> None:
    first, second = np.arange(6.0), np.arange(6.0) + 10
    same = {"allgather": [0, 10, 11], "broadcast": second, "sum": first + second}
    same["bools"] = [True, False]
    wanted: list[dict[str, Any]] = [
        {"alltoall": [0, 1, 2, 10, 11, 12], "scatter": [10, 12, 14]},
        {"alltoall": [3, 4, 5, 13, 14, 15], "scatter": [16, 18]},
    ]
    wanted[0] |= {"uneven": [0, 10, 11], "got": [1, 2]}
    wanted[1] |= {"uneven": [*first[1:], *second[2:]], "got": [5, 4]}
    for found, rows in zip(both(ranks, "moves_rows"), wanted, strict=True):
        for name, (eager, graph) in found.items():
            np.testing.assert_array_equal(eager.ravel(), (same | rows)[name], name)
            np.testing.assert_array_equal(eager, graph, name)


def test_factors_and_compression(ranks: list[dict[str, Any]]) -> None:
    for found in both(ranks, "scales"):
        np.testing.assert_array_equal(found["float"], [3.0, 3.0])
        np.testing.assert_array_equal(found["int"], [5, 5])  # (7 + 14) / 2 = 10, times 0.5
        np.testing.assert_allclose(found["fp16"], [1 / 3] * 2, rtol=2**-11)
        assert found["fp16"][0] != np.float32(1 / 3)


def test_function_exchanges_from_its_second_trace_on(ranks: list[dict[str, Any]]) -> None:
    # The first trace exchanges nothing; the two others step the optimizer once, by their sum.
    assert both(ranks, "exchanges_at_later_traces") == [
        [1.0, 4.0, 4.0, -6.0],
        [2.0, 5.0, 5.0, -6.0],
    ]


def test_graphs_keep_the_order_of_the_program(ranks: list[dict[str, Any]]) -> None:
    for runs in both(ranks, "keeps_the_order_of_the_program_in_graphs"):
        for values, total in runs:
            np.testing.assert_array_equal(
                values, [number * 20.0 + 1 for number in range(tensorflow_programs.MANY)]
            )
            assert total == 12.0


def test_gradients_are_those_of_horovod(ranks: list[dict[str, Any]]) -> None:
    one = np.arange(1.0, 5.0)  # what comes from above, times rank + 1
    wanted: list[dict[str, Any]] = [
        {"allgather": [1.5, 0, 0, 0], "broadcast": one * 0, "alltoall": [1, 2, 4, 6]},
        {"allgather": [3, 4.5, 0, 0], "broadcast": one * 1.5, "alltoall": [2, 8, 10, 12]},
    ]
    same: dict[str, Any] = {
        "sum": one * 3,
        "average": one * 3,  # prescale_factor 2
        "reducescatter": [2, 4, 4, 8],
        "tape": one * 1.5,
        "dict": one * 3,
        "twice": one * 4,
    }
    for found, own in zip(both(ranks, "differentiates"), wanted, strict=True):
        for name, values in (own | same).items():
            np.testing.assert_allclose(found[name], values, err_msg=name)


def test_sparse_gradients_are_averaged(ranks: list[dict[str, Any]]) -> None:
    for found in both(ranks, "averages_sparse_gradients"):
        for values in found.values():
            np.testing.assert_array_equal(values, [0.5, 0, 1, 0, 1])


def test_averages_of_slices_of_whole_numbers_are_not_rounded(ranks: list[dict[str, Any]]) -> None:
    for found in both(ranks, "averages_slices_of_whole_numbers"):
        for dtype, averages in found.items():
            wide = "float32" if dtype.endswith("8") else "float64"
            assert averages == [(wide, [0.5, 0.5, 1.0])] * 2, dtype


def test_objects_and_variables_reach_everybody(ranks: list[dict[str, Any]]) -> None:
    first, second = both(ranks, "sends_objects_and_variables")
    np.testing.assert_array_equal(first["weights"], second["weights"])
    for found in (first, second):
        assert found["objects"] == [[0, "x"], [1, "xx"]]
        assert found["object"] == {"from": 1}
        assert found["others"][0] == 1
        assert found["others"][1].tolist() == [True, False]
        assert found["others"][2] == [1.0]


def test_loop_with_a_tape_ends_with_the_same_weights(ranks: list[dict[str, Any]]) -> None:
    first, second = both(ranks, "trains_in_a_loop_of_its_own")
    np.testing.assert_array_equal(first, second)


_REFUSED = {
    "text": "tensors of dtype string cannot be reduced",
    "slices": "RemovedError: tf.IndexedSlices can be summed and averaged",
    "slices with a factor": "RemovedError: tf.IndexedSlices can be summed and averaged",
    "gradient of max": "no gradient of a reduction by max",
    "predivide": "gradient_predivide_factor divides averages",
    "old optimizer": "RemovedError: GradientDescentOptimizer is an optimizer of TensorFlow 1",
    "no optimizer": "'adam' must be an optimizer of Keras 3",
    "other variables": "MismatchError: ",
    "other shapes in a graph": "UnknownError: ",
    "barrier in a graph": "call it outside",
}


def test_what_cannot_be_is_refused_by_name_and_harms_nobody(ranks: list[dict[str, Any]]) -> None:
    for found in both(ranks, "refuses"):
        told = {what: text for what, text in found.items() if what != "after"}
        assert {what: text for what, text in told.items() if _REFUSED[what] not in text} == {}
        assert told.keys() == _REFUSED.keys()
        assert found["after"] == 2.0


def test_eager_errors_are_those_of_tensorflow(ranks: list[dict[str, Any]]) -> None:
    arguments = dict.fromkeys(("splits", "uneven", "scalar", "scalar in a graph"))
    wanted = {name: ["InvalidArgumentError"] for name in arguments}
    different = dict.fromkeys(("shapes", "types", "same bytes", "roots", "gradient"))
    wanted |= {name: ["FailedPreconditionError"] for name in different}
    assert both(ranks, "raises_tensorflows_errors") == [wanted] * 2


def test_member_that_has_joined_takes_part_with_zeros(ranks: list[dict[str, Any]]) -> None:
    assert both(ranks, "joins") == [[[6.0], 1], [[6.0, 3.0], 1]]


def test_fit_on_two_nodes_equals_fit_in_one_process(fitted: list[dict[str, Any]]) -> None:
    for name in fitted[0]["fits"]:
        first, second = (found["fits"][name] for found in fitted)
        np.testing.assert_array_equal(first["weights"], second["weights"], name)
        noise = 1e-3 if name == "half" else 1e-6
        np.testing.assert_allclose(first["weights"], first["alone"], atol=noise, err_msg=name)
        assert first["steps"] == 2 * STEPS, name


def test_metrics_are_averaged(fitted: list[dict[str, Any]]) -> None:
    first, second = (found["advanced"] for found in fitted)
    assert first["history"] == second["history"]
    assert set(first["history"]) == {"loss", "mae", "lr"}


def test_learning_rate_warms_up_and_decays(fitted: list[dict[str, Any]]) -> None:
    steps = np.arange(1, 9) / 4  # four batches an epoch, warm-up over two epochs
    warm = 0.1 / 2 * (steps / 2 + 1)
    wanted = [*warm, *[0.1] * 4, *[0.01] * 4]
    for found in fitted:
        np.testing.assert_allclose(found["advanced"]["rates"], wanted, rtol=1e-6)


def test_model_that_is_loaded_goes_on_together(fitted: list[dict[str, Any]]) -> None:
    first, second = (found["advanced"] for found in fitted)
    np.testing.assert_array_equal(first["weights"], second["weights"])
    np.testing.assert_array_equal(first["loaded"], second["loaded"])
    assert first["steps"] in (4, 8, 12, 16)  # after the best epoch
    assert first["loaded_as"] == "SGD"


def test_saved_model_needs_no_sparkdl(fitted: list[dict[str, Any]]) -> None:
    for found in fitted:
        assert found["advanced"]["stock"] == ["keras", False]


_REFUSED_BY_FIT = {
    "twice": "is a DistributedOptimizer already",
    "passes": "backward_passes_per_step=0",
    "initial_lr": "needs initial_lr",
    "steps": "give it steps_per_epoch",
}


def test_what_cannot_be_fitted_is_refused_by_name(fitted: list[dict[str, Any]]) -> None:
    for found in fitted:
        refused = found["refused"]
        assert all(text in refused[what] for what, text in _REFUSED_BY_FIT.items()), refused


def test_keras_3_keeps_the_model_out_of_xla(fitted: list[dict[str, Any]]) -> None:
    for found in fitted:
        assert found["jit"] == [True, False]


def test_interrupted_fit_goes_on_at_the_last_commit(pair: Lab) -> None:
    first, second = together(pair, goes_on_at_the_last_commit)
    assert first == second
    assert first["begun"] == [1, 1, STEPS + 2]  # the second epoch, after two of its batches
    assert first["epoch"] == EPOCHS
    assert first["steps"] == STEPS + 2 + 2 * STEPS  # the interrupted epoch began anew
    assert first["plain"] == [[0.0], 0]
