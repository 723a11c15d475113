"""Losses, labels and metrics of one batch of PyTorch, beside PyTorch's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.torch_batch import (
    accuracy,
    fitted_label,
    loss_of,
    metrics_of,
    optimizer_of,
    target_of,
)
from tests.doubles.lazy import Lazy

torch: Any = Lazy("torch")
pytestmark = [pytest.mark.torch]

LOGITS = [[2.0, -1.0, 0.5], [0.0, 1.0, 3.0], [1.0, 1.0, -2.0], [0.0, 0.5, 0.0]]
CLASSES = [0.0, 2.0, 1.0, 1.0]
WEIGHTS = [1.0, 0.0, 2.0, 0.5]


def t(values: Any, dtype: Any = None) -> Any:
    return torch.tensor(values, dtype=dtype)


def cross_entropy() -> Any:
    return torch.nn.functional.cross_entropy(t(LOGITS), t(CLASSES).long(), reduction="none")


def by_hand(output: Any, label: Any) -> Any:
    return torch.nn.functional.cross_entropy(output, label.long(), reduction="none")


@pytest.mark.parametrize(
    "make",
    [
        *(lambda: "CrossEntropyLoss", lambda: "crossentropyloss"),
        *(lambda: torch.nn.CrossEntropyLoss, lambda: torch.nn.CrossEntropyLoss()),
        *(lambda: torch.nn.functional.cross_entropy, lambda: by_hand),
    ],
    ids=["class", "lower case", "type", "module", "function", "by hand"],
)
def test_loss_is_the_mean_over_the_rows_of_what_each_weighs(make: Any) -> None:
    given = make()
    loss = loss_of(given)
    label = fitted_label(loss, t(LOGITS), t(CLASSES, torch.float64), "y")
    expected = cross_entropy()
    assert loss.of(t(LOGITS), label, None).item() == pytest.approx(expected.mean().item())
    weighted = loss.of(t(LOGITS), label, t(WEIGHTS)).item()
    assert weighted == pytest.approx((expected * t(WEIGHTS)).mean().item())
    assert (loss.scores == "logits") == (given is not by_hand)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("MSE", "loss: PyTorch has no 'MSE'; did you mean 'MSELoss'"),
        (7, "loss=7: give a name of torch.nn, a module, or function"),
        (
            lambda: torch.nn.MSELoss(reduction="sum"),
            "a sum over the rows .* Give it reduction='mean'",
        ),
    ],
)
def test_what_is_no_loss_is_refused(given: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        loss_of(given() if callable(given) else given)


def test_weights_need_the_loss_of_each_row() -> None:
    only_mean = loss_of(lambda output, label: (output - label).abs().mean())
    assert only_mean.of(t(LOGITS), t(LOGITS), None).item() == 0
    with pytest.raises(ConfigError, match="returned a single number, and weight_col needs"):
        only_mean.of(t(LOGITS), t(LOGITS), t(WEIGHTS))
    batchmean = loss_of(torch.nn.KLDivLoss(reduction="batchmean"))
    with pytest.raises(ConfigError, match="the loss KLDivLoss returned a single number"):
        batchmean.of(t(LOGITS), t(LOGITS), t(WEIGHTS))


@pytest.mark.parametrize(
    ("loss", "output", "label", "expected"),
    [
        ("MSELoss", [[1.0], [2.0]], [3.0, 4.0], [[3.0], [4.0]]),
        ("MSELoss", [1.0, 2.0], [[3], [4]], [3.0, 4.0]),
        ("BCEWithLogitsLoss", [[1.0], [2.0]], [True, False], [[1.0], [0.0]]),
        ("CrossEntropyLoss", LOGITS, CLASSES, [0, 2, 1, 1]),
        ("CrossEntropyLoss", LOGITS, [[v] for v in CLASSES], [0, 2, 1, 1]),
        ("CrossEntropyLoss", LOGITS[:1], [[0.2, 0.3, 0.5]], [[0.2, 0.3, 0.5]]),
        (by_hand, LOGITS, CLASSES, CLASSES),
        (by_hand, LOGITS, [0, 2, 1, 1], [0, 2, 1, 1]),
    ],
)
def test_label_comes_as_loss_takes_it(loss: Any, output: Any, label: Any, expected: Any) -> None:
    given = t(label, torch.float64) if isinstance(np.ravel(label)[0], float) else t(label)
    found = fitted_label(loss_of(loss), t(output), given, "y")
    assert found.dtype == t(expected).dtype
    assert found.tolist() == t(expected).tolist()


@pytest.mark.parametrize(
    ("loss", "output", "label", "match"),
    [
        ("MSELoss", LOGITS, CLASSES, r"compares .*float32 \[4, 3\].*'y', float32 \[4\].*Cross"),
        ("CrossEntropyLoss", LOGITS, WEIGHTS, "numbers of classes, and column 'y' holds 0.5"),
    ],
)
def test_label_that_does_not_fit_is_refused(loss: str, output: Any, label: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        fitted_label(loss_of(loss), t(output), t(label), "y")


def largest(output: Any, label: Any) -> Any:
    return output.max(dim=1).values


@pytest.mark.parametrize(
    ("loss", "output", "label", "expected"),
    [
        ("CrossEntropyLoss", LOGITS, [0, 2, 0, 2], 0.75),
        ("CrossEntropyLoss", LOGITS, [[1.0, 0.0, 0.0]] * 4, 0.5),
        ("BCEWithLogitsLoss", [[0.1], [-0.1], [2.0]], [[1.0], [1.0], [1.0]], 2 / 3),
        ("BCELoss", [[0.1], [0.6], [0.7]], [[0.0], [0.0], [1.0]], 2 / 3),
        ("BCEWithLogitsLoss", LOGITS[:2], [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]], 5 / 6),
        (by_hand, LOGITS, [[0], [2], [0], [2]], 0.75),
    ],
)
def test_accuracy_is_that_of_the_loss(loss: Any, output: Any, label: Any, expected: float) -> None:
    found = accuracy(loss_of(loss), t(output), t(label))
    assert found.double().mean().item() == pytest.approx(expected)


def test_metrics_with_states_take_integers_for_classes() -> None:
    for loss, label, kind in (
        ("BCEWithLogitsLoss", [[1.0], [0.0]], torch.int64),
        ("BCEWithLogitsLoss", [[0.5], [0.0]], torch.float32),
        ("MSELoss", [[1.0], [0.0]], torch.float32),
    ):
        assert target_of(loss_of(loss), t(label)).dtype == kind
    with pytest.raises(ConfigError, match="'accuracy' takes one output and one label"):
        accuracy(loss_of(by_hand), (), t(0.0))


def test_metrics_are_called_by_their_names() -> None:
    assert list(metrics_of(["accuracy", largest])) == ["accuracy", "largest"]
    for metric in ("l1_loss", 3):
        with pytest.raises(ConfigError, match=f"metrics has {metric!r}: give"):
            metrics_of([metric])


def test_optimizer_is_made_of_what_names_it() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    sgd = torch.optim.SGD
    for given, rate in (("sgd", 0.001), ("SGD", 0.001), (sgd, 0.001), (partial(sgd, lr=9.0), 9.0)):
        made = optimizer_of(given, parameters)
        assert isinstance(made, sgd)
        assert made.param_groups[0]["lr"] == rate
    for wrong, match in (
        ("adamm", "optimizer: PyTorch has no 'adamm'; did you mean 'Adam"),
        (made, r"a function of them: functools.partial\(torch.optim.SGD, lr="),
        (lambda own: own, "returned a list: must be an optimizer"),
        (7, "optimizer=7: give a name or class"),
    ):
        with pytest.raises(ConfigError, match=match):
            optimizer_of(wrong, parameters)


@pytest.mark.parametrize("label", [[1.0, -1.0, 0.0], [[1.0], [-1.0], [0.0]]])
@pytest.mark.parametrize("output", [[0.5, 1.0, 2.0], [[0.5], [1.0], [2.0]]])
def test_own_function_gets_the_label_in_the_shape_of_the_output(output: Any, label: Any) -> None:
    found = []
    for given in ("MSELoss", lambda o, y: ((o - y) ** 2).mean()):
        loss = loss_of(given)
        found.append(loss.of(t(output), fitted_label(loss, t(output), t(label), "y"), None))
    assert found[0] == found[1]
