"""Optimizers, losses, metrics and histories between Horovod's estimator and ours; no Spark."""

from __future__ import annotations

from typing import Any

import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.spark.torch import Losses, OptimizerMaker
from tests.doubles.lazy import Lazy

pytestmark = pytest.mark.torch
torch: Any = Lazy("torch")


def test_parameter_groups_keep_their_rates_and_state() -> None:
    def module() -> Any:
        return torch.nn.Linear(2, 1)

    first, other = module(), module()
    groups = [{"params": [first.bias], "lr": 0.0}, {"params": [first.weight]}]
    optimizer = torch.optim.Adam(groups, lr=0.2)
    first(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    maker = OptimizerMaker.of(optimizer, first)
    made = OptimizerMaker(maker.kind, maker.groups, maker.state, 2)(other.parameters())
    assert [group["lr"] for group in made.param_groups] == [0.0, 0.4]
    assert made.param_groups[0]["params"][0] is other.bias
    assert made.state[other.weight]["step"] == 1
    with pytest.raises(ConfigError, match="parameters are not the model's"):
        OptimizerMaker.of(optimizer, torch.nn.Linear(3, 1))


def test_losses_of_several_labels_are_weighed_for_batches_and_rows() -> None:
    outputs = torch.ones(3, 1), torch.zeros(3, 4)
    labels = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 2.0])
    squares = torch.nn.functional.mse_loss
    functions = [squares, torch.nn.CrossEntropyLoss()]
    losses = Losses(functions, [1.0, 0.5], ["a", "b"])
    entropy = torch.log(torch.tensor(4.0))
    assert torch.allclose(losses(outputs, labels), 5 / 3 + 0.5 * entropy)
    rows = Losses(functions, [1.0, 0.5], ["a", "b"], "none")(outputs, labels)
    assert torch.allclose(rows, torch.tensor([0.0, 1.0, 4.0]) + 0.5 * entropy)
    with pytest.raises(ConfigError, match="has 1 outputs, and needs one for each label: a, b"):
        losses(outputs[0], labels)
    # Three rows of three numbers, and three labels: PyTorch would compare each with all.
    with pytest.raises(ConfigError, match=r"compares the model's output .* with column 'a'"):
        Losses([squares], None, ["a"])(torch.zeros(3, 3), labels[0])
