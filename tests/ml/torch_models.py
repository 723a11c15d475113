"""Small models of PyTorch, of known weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from sparkdl.ml.model_file import ModelFile
from sparkdl.ml.scoring.source import ModelSource
from sparkdl.ml.scoring.torch import save_module
from tests.ml.models import BIAS, WEIGHTS

if TYPE_CHECKING:
    import torch


def source(module: Any) -> ModelSource:
    return ModelFile("module", partial(save_module, module=module)).whole


def two_in_two_out() -> torch.nn.Module:
    """Make a module: `left` [rows, 3], `right` int64 [rows]; [rows, 2], and `right` + 1.

    The first output is `models.linear` of `left`, scaled by `scale`, plus `right`.
    """
    import torch

    class TwoInTwoOut(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = torch.nn.Linear(3, 2)

        def forward(
            self, left: torch.Tensor, right: torch.Tensor, scale: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            found = self.dense(left) + right.unsqueeze(1)
            if scale is not None:
                found = found * scale
            return found, right + 1

    module = TwoInTwoOut()
    with torch.no_grad():
        module.dense.weight.copy_(torch.tensor(WEIGHTS.T.copy()))
        module.dense.bias.copy_(torch.tensor(BIAS))
    return module


def named() -> torch.nn.Module:
    """Make a module: `x` [rows, n]; a dict of `twice` [rows, n] and `sum` [rows]."""
    import torch

    class Named(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            twice = x * self.factor
            return {"twice": twice, "sum": twice.sum(1), "note": "no tensor"}

    return Named()
