"""One batch of PyTorch: losses with weights, labels that fit the loss, metrics over all rows.

Runs in: child. Names of losses and optimizers are looked up in the driver as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from sparkdl.core.errors import ConfigError
from sparkdl.core.texts import did_you_mean

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

Scores = Literal["", "logits", "logit", "sigmoid"]
"""A classifier's output: logits of all classes, or logit or probability of the second of two."""
ACCURACY = "accuracy"
_CLASSES = ("CrossEntropyLoss", "NLLLoss", "MultiMarginLoss", "cross_entropy", "nll_loss")
"""The losses that take the number of a class for each row."""
_SCORES: Mapping[str, Scores] = {
    **dict.fromkeys(_CLASSES, "logits"),
    "BCEWithLogitsLoss": "logit",
    "binary_cross_entropy_with_logits": "logit",
    "BCELoss": "sigmoid",
    "binary_cross_entropy": "sigmoid",
}


@dataclass(frozen=True)
class Loss:
    """A loss as it is applied to a batch.

    Attributes:
        call: of the model's output and the label.
        by_row: likewise, but returns the loss of each row; None if only the mean is known.
        takes_classes: the label may be the number of a class.
        scores: what a classifier's output is, as far as the loss says it.
        is_own: a function of the user's, which is given output and label as they are.
    """

    name: str
    call: Callable[[Any, Any], Any]
    by_row: Callable[[Any, Any], Any] | None
    takes_classes: bool = False
    scores: Scores = ""
    is_own: bool = False

    def of(self, output: Any, label: Any, weight: torch.Tensor | None) -> torch.Tensor:
        """Return the mean over the rows of their losses, each times its weight."""
        if weight is None:
            # A function of the user's may return the loss of each row.
            return self.call(output, label).mean()
        found = (self.by_row or self.call)(output, label)
        if not found.ndim:
            raise ConfigError(
                f"the loss {self.name} returned a single number, and weight_col needs the loss of "
                "each row: return a tensor [rows], or give a loss of torch.nn"
            )
        # A row may have several values, as an image has.
        return (found.reshape(len(weight), -1).mean(1) * weight).mean()


def loss_of(given: Any) -> Loss:
    """Return a loss by its name, class, module or function.

    Args:
        given: a name in `torch.nn`, a module, its class, or `function(output, label)` that
            returns the mean, or `[rows]`.
    """
    from torch import nn

    found = _named(given, nn, "loss") if isinstance(given, str) else given
    found = found() if isinstance(found, type) else found
    if not callable(found):
        raise ConfigError(
            f"loss={given!r}: give a name of torch.nn, a module, or function(output, label)"
        )
    if isinstance(found, nn.modules.loss._Loss):
        return _module_loss(found)
    name = getattr(found, "__name__", type(found).__name__)
    # Some functions of `torch.nn.functional` are C's, and say so.
    if getattr(found, "__module__", "") in ("torch.nn.functional", "torch._C._nn"):
        by_row = partial(found, reduction="none")
        return Loss(name, found, by_row, name in _CLASSES, _SCORES.get(name, ""))
    return Loss(name, found, None, is_own=True)


def _module_loss(module: Any) -> Loss:
    # PyTorch's class, because a subclass takes the same labels.
    home = "torch.nn.modules.loss"
    name = next(kind.__name__ for kind in type(module).__mro__ if kind.__module__ == home)
    if module.reduction == "sum":
        raise ConfigError(
            f"loss={module}: a sum over the rows of a node depends on how many nodes there are. "
            "Give it reduction='mean'"
        )
    by_row = None
    # It adds a row's values up, and `Loss.of` would take their mean.
    if module.reduction != "batchmean":
        # A copy, because the module is the user's, and its reduction is read at every call.
        by_row = copy.copy(module)
        by_row.reduction = "none"
    is_own = type(module).__name__ != name
    return Loss(name, module, by_row, name in _CLASSES, _SCORES.get(name, ""), is_own)


def _named(name: str, home: Any, what: str) -> Any:
    known = {
        each.lower(): each
        for each in dir(home)
        if isinstance(getattr(home, each), type) and (what != "loss" or each.endswith("Loss"))
    }
    if name.lower() not in known:
        near = did_you_mean(name, known.values(), 0.5)
        raise ConfigError(
            f"{what}: PyTorch has no {name!r}{near or '.'} Give a name that PyTorch has, or the "
            "object itself"
        )
    return getattr(home, known[name.lower()])


def optimizer_of(given: Any, parameters: Any) -> Optimizer:
    """Return an optimizer of these parameters.

    Args:
        given: a name in `torch.optim`, a class, or `function(parameters)`.
    """
    from torch import optim

    made = check_optimizer(given)(parameters)
    if not isinstance(made, optim.Optimizer):
        raise ConfigError(
            f"the function that makes the optimizer returned a {type(made).__name__}: must be an "
            "optimizer of torch.optim"
        )
    return made


def check_optimizer(given: Any) -> Callable[..., Any]:
    """Return what makes an optimizer."""
    from torch import optim

    if isinstance(given, optim.Optimizer):
        raise ConfigError(
            f"optimizer is a {type(given).__name__} of parameters that stay on the driver. Give a "
            f"function of them: functools.partial(torch.optim.{type(given).__name__}, lr=…)"
        )
    found = _named(given, optim, "optimizer") if isinstance(given, str) else given
    if not callable(found):
        raise ConfigError(
            f"optimizer={given!r}: give a name or class of torch.optim, or function(parameters)"
        )
    made: Callable[..., Any] = found
    return made


def fitted_label(loss: Loss, output: Any, label: torch.Tensor, column: str) -> torch.Tensor:
    """Return a label as the loss takes it.

    Numbers of classes become int64. For PyTorch's other losses the label gets the output's shape
    and dtype: with different shapes, broadcasting would mix the rows. A function of the user's gets
    the label as it is, floats in the output's dtype; and in the output's shape, where one of them
    is [rows] and the other [rows, 1].
    """
    dtype = getattr(output, "dtype", None)
    if dtype is None or not hasattr(label, "dtype"):  # for a function of the user's alone
        return floats_as(dtype, label)
    if loss.takes_classes and label.shape != output.shape:
        return _classes(loss, output, label, column)
    if loss.is_own:
        label = label.to(dtype) if label.is_floating_point() else label
        # As Keras does: PyTorch would compare each row of [rows, 1] with all of [rows].
        sizes = tuple(label.shape), tuple(output.shape)
        is_alike = (*sizes[0], 1) == sizes[1] or (*sizes[1], 1) == sizes[0]
        return label.reshape(output.shape) if is_alike else label
    if label.numel() != output.numel():
        raise ConfigError(
            f"the loss {loss.name} compares the model's output {described(output)} with column "
            f"{column!r}, {described(label)}: both must have as many values. For the number of a "
            "class in each row give loss='CrossEntropyLoss'; or end the model with as many outputs "
            "as there are labels"
        )
    return label.reshape(output.shape).to(dtype)


def floats_as(dtype: Any, label: Any) -> Any:
    """Return a label, or several, with floats in a dtype; float32 for None."""
    import torch

    if isinstance(label, Mapping):
        return {name: floats_as(dtype, each) for name, each in label.items()}
    if isinstance(label, tuple):
        return tuple(floats_as(dtype, each) for each in label)
    if isinstance(label, list):  # texts
        return label
    return label.to(dtype or torch.float32) if label.is_floating_point() else label


def _classes(loss: Loss, output: Any, label: torch.Tensor, column: str) -> torch.Tensor:
    if label.ndim == 2 == output.ndim and label.shape[1] == 1:
        label = label[:, 0]
    if label.is_floating_point() and not bool((label == label.round()).all()):
        raise ConfigError(
            f"the loss {loss.name} takes the numbers of classes, and column {column!r} holds "
            f"{label[label != label.round()][0].item():g}: index the classes from 0, for example "
            "with pyspark.ml.feature.StringIndexer"
        )
    return label.long()


def described(value: Any) -> str:
    """Return dtype and shape: `float32 [32, 10]`."""
    if not hasattr(value, "dtype"):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def metrics_of(given: Any) -> dict[str, Any]:
    """Return metrics by name.

    Args:
        given: a dict, or a list, of `"accuracy"`, metrics of torchmetrics, and
            `function(output, label)` that returns the mean, or `[rows]`.
    """
    if not isinstance(given, Mapping):
        given = {_name_of(each): each for each in given or ()}
    for each in given.values():
        if each != ACCURACY and not callable(each):
            raise ConfigError(
                f"metrics has {each!r}: give 'accuracy', a function(output, label), or a metric of "
                "torchmetrics"
            )
    return dict(given)


def _name_of(metric: Any) -> str:
    return metric if metric == ACCURACY else getattr(metric, "__name__", type(metric).__name__)


def accuracy(loss: Loss, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return for each row, or each of its values, whether the most likely class is the label."""
    if not hasattr(output, "ndim") or not hasattr(label, "ndim"):
        raise ConfigError(
            "the metric 'accuracy' takes one output and one label: give a function of the model's "
            f"output, a {type(output).__name__}, and the label, a {type(label).__name__}"
        )
    is_own_shape = label.shape == output.shape
    if output.ndim > 1 and output.shape[1] > 1 and (loss.takes_classes or not is_own_shape):
        found = output.argmax(1)
        return found == (label.argmax(1) if is_own_shape else label.reshape(found.shape))
    # A logit of 0 is a probability of 0.5.
    is_likely = output > (0.0 if loss.scores == "logit" else 0.5)
    return is_likely == (label.reshape(output.shape) > 0.5)


def target_of(loss: Loss, label: Any) -> Any:
    """Return a label as torchmetrics takes it: integers for the second of two classes."""
    if loss.scores not in ("logit", "sigmoid") or bool((label != label.round()).any()):
        return label
    return label.long()
