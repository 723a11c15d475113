"""Gradients that travel together, in one tensor.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Bucket:
    """Gradients in a row, and behind them a 1 for each that this process has.

    Args:
        params: whose gradients they are.
        is_sparse: of each, whether a process has had a sparse one: where this one has none of its
            own, it gets a sparse one too.
    """

    def __init__(
        self, params: Sequence[torch.nn.Parameter], is_sparse: Sequence[bool] | None = None
    ) -> None:
        import torch

        self.params = list(params)
        self._is_sparse = list(is_sparse or [False] * len(self.params))
        sizes = [param.numel() for param in self.params]
        like = self.params[0]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=like.dtype, device=like.device)
        self.waits_for = len(sizes)
        self._has = [0.0] * len(sizes)
        self._sizes = [*sizes, len(sizes)]
        *rows, self._presence = self.flat.split(self._sizes)
        shaped = zip(rows, self.params, strict=True)
        self._rows = [row.view(param.shape) for row, param in shaped]

    def fill(self, place: int, grad: torch.Tensor | None) -> None:
        """Put a gradient in."""
        import torch

        if grad is None:
            self._rows[place].zero_()
        else:
            self._rows[place].copy_(grad.to_dense() if grad.is_sparse else grad)
        self._has[place] = float(grad is not None)
        self.waits_for -= 1
        if not self.waits_for:
            self._presence.copy_(torch.tensor(self._has))

    def spread(self, reduced: torch.Tensor, can_be_absent: bool) -> None:
        """Put reduced gradients where they are from; where no process has one, none."""
        import torch

        *rows, presence = reduced.split(self._sizes)
        is_there = [True] * len(rows)
        if can_be_absent and any(param.grad is None for param in self.params):
            is_there = (presence > 0).tolist()
        grads, results = [], []
        places = zip(self.params, rows, is_there, self._is_sparse, strict=True)
        for param, row, there, was_sparse in places:
            grad, result = param.grad, row.view(param.shape)
            if grad is None and not there:
                continue
            if was_sparse if grad is None else grad.is_sparse:
                param.grad = result.to_sparse(1)
            elif grad is None:
                param.grad = result.to(param.dtype, copy=True)
            else:
                grads.append(grad)
                results.append(result)
        if grads:
            torch._foreach_copy_(grads, results)
        self.waits_for = len(rows)
