"""Horovod's optimizers, losses and metrics as `sparkdl.TorchEstimator` takes them.

Runs in: driver, child
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.torch_batch import Loss, fitted_label, loss_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OptimizerMaker:
    """Makes an optimizer again, of another copy of the parameters.

    Attributes:
        kind: its class.
        groups: for each parameter group the places of its parameters among the model's.
        state: its `state_dict()`.
        factor: of the learning rates.
    """

    kind: type[torch.optim.Optimizer]
    groups: list[list[int]]
    state: dict[str, Any]
    factor: float = 1.0

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> OptimizerMaker:
        """Take an optimizer's state."""
        params = list(model.parameters())
        places = {id(param): place for place, param in enumerate(params)}
        own = [group["params"] for group in optimizer.param_groups]
        if all(id(param) in places for group in own for param in group):
            groups = [[places[id(param)] for param in group] for group in own]
        elif len(own) == 1 and [p.shape for p in own[0]] == [p.shape for p in params]:
            groups = [list(range(len(params)))]  # made of a copy of the model
        else:
            raise ConfigError(
                "the optimizer's parameters are not the model's: make it of the model that the "
                "estimator is given, optimizer=SGD(model.parameters(), …)"
            )
        return cls(type(optimizer), groups, optimizer.state_dict())

    def __call__(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of these parameters."""
        params = list(parameters)
        # In PyTorch's state the groups have numbers in the place of parameters.
        saved: list[dict[str, Any]] = self.state["param_groups"]
        groups = [
            {
                **{n: x for n, x in group.items() if n != "params"},
                "params": [params[i] for i in own],
            }
            for group, own in zip(saved, self.groups, strict=True)
        ]
        rate = {"lr": saved[0]["lr"]} if "lr" in saved[0] else {}  # some classes demand one
        made = self.kind(groups, **rate)
        # Momenta and counts of steps, so that the training goes on and does not begin.
        made.load_state_dict(self.state)
        multiply_rates(made.param_groups, self.factor)
        return made


def multiply_rates(groups: Sequence[dict[str, Any]], factor: float) -> None:
    for group in groups:
        for name in ("lr", "initial_lr"):
            if name in group:
                group[name] = group[name] * factor


@dataclass(frozen=True)
class Losses:
    """The weighted sum of the losses of all labels.

    Attributes:
        functions: one for each label.
        weights: of the labels; equal ones, of the sum 1, if it is not given.
        names: of the labels.
        reduction: `mean`, or `none` for the losses of the rows.
    """

    functions: Sequence[Callable[..., Any]]
    weights: Sequence[float] | None
    names: Sequence[str]
    reduction: str = "mean"

    def __call__(self, output: Any, label: Any) -> Any:
        weights = self.weights or [1.0 / len(self.names)] * len(self.names)
        pairs = matched(output, label, self.names)
        terms = zip(weights, self.functions, pairs, self.names, strict=True)
        return sum(weight * self._loss(loss_of(f), *pair, n) for weight, f, pair, n in terms)

    def to(self, device: Any) -> Losses:
        for each in self.functions:
            if hasattr(each, "to"):
                each.to(device)
        return self

    def _loss(self, loss: Loss, output: Any, label: Any, name: str) -> Any:
        label = fitted_label(loss, output, label, name)
        if self.reduction == "mean":
            return loss.of(output, label, None)
        # A function of the user's takes it, too, as under Horovod.
        by_row: Any = loss.by_row or partial(loss.call, **{"reduction": self.reduction})
        found = by_row(output, label)
        return found.reshape(len(found), -1).mean(1)


@dataclass(frozen=True)
class LabelMetric:
    """A metric of one label."""

    function: Callable[..., Any]
    place: int
    names: Sequence[str]

    def __call__(self, output: Any, label: Any) -> Any:
        return self.function(*matched(output, label, self.names)[self.place])


def metrics_by_name(metrics: Sequence[Any], names: Sequence[str]) -> dict[str, LabelMetric]:
    """Return metrics by `group_<number>_<label>`.

    Args:
        metrics: functions; or lists with one for all labels, or one for each.
    """
    found = {}
    for number, group in enumerate(metrics):
        for place, function in enumerate(for_each(group, len(names))):
            found[f"group_{number}_{names[place]}"] = LabelMetric(function, place, names)
    return found


def history_of(found: Mapping[str, Sequence[float]], metrics: Sequence[str]) -> list[Any]:
    """Return a history as Horovod has it: an entry for each epoch."""
    groups: dict[str, list[str]] = {}
    for name in metrics:
        groups.setdefault(name.split("_")[1], []).append(name)

    def part(prefix: str, epoch: int) -> dict[str, Any]:
        own = [{n: found[f"{prefix}{n}"][epoch] for n in names} for names in groups.values()]
        return {"loss": found[f"{prefix}loss"][epoch], "all_metrics": own}

    parts = {"train": "", **({"validation": "val_"} if "val_loss" in found else {})}
    return [
        {"epoch": epoch, **{name: part(prefix, epoch) for name, prefix in parts.items()}}
        for epoch in range(len(found["loss"]))
    ]


def matched(output: Any, label: Any, names: Sequence[str]) -> list[tuple[Any, Any]]:
    """Return output and label for each name, labels in the outputs' shapes where these fit."""
    outputs = list(output) if isinstance(output, list | tuple) else [output]
    labels = list(label) if isinstance(label, list | tuple) else [label]
    if len(outputs) < len(names):
        raise ConfigError(
            f"the model has {len(outputs)} outputs, and needs one for each label: "
            f"{', '.join(names)}"
        )
    return [
        (output, label.reshape(output.shape) if output.numel() == label.numel() else label)
        for output, label in zip(outputs, labels, strict=False)
    ]


def for_each(value: Any, count: int) -> list[Any]:
    """Return a value for each of `count` labels: one for all of them, or a list."""
    found = list(value) if isinstance(value, list | tuple) else [value]
    if len(found) == 1:
        return found * count
    if len(found) != count:
        raise ConfigError(f"List {found} must be length {count} (found: {len(found)})")
    return found
