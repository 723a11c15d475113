"""`hvd.SyncBatchNorm`: batch normalization over the batches of all processes.

Ioffe and Szegedy, https://arxiv.org/abs/1502.03167, with mean and variance of the global batch.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@cache
def sync_batch_norm() -> Any:
    import torch
    from torch.nn.modules.batchnorm import _BatchNorm

    from sparkdl.horovod.common import Sum, size
    from sparkdl.horovod.torch.mpi_ops import allreduce

    class SyncBatchNorm(_BatchNorm):  # type: ignore[misc]
        """Applies batch normalization to `[N, C, …]`, with statistics over all processes.

        PyTorch's own, in the arguments as well, but on CPUs too, and without a process group.
        Processes may have batches of different sizes.
        """

        def _check_input_dim(self, input: torch.Tensor) -> None:
            if input.dim() < 2:
                raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            """Return the normalized input."""
            uses_own = not self.training and self.running_mean is not None
            if uses_own or size() == 1:
                return super().forward(input)
            self._check_input_dim(input)
            over = [dim for dim in range(input.dim()) if dim != 1]
            # Sums of many squares overflow float16.
            wide = input.float() if input.dtype.itemsize < 4 else input
            count = wide.new_full((1,), input.numel() // input.shape[1])
            # One reduction for both, because a small one costs its way alone.
            sums = torch.cat([wide.sum(over), count])
            total = allreduce(sums, op=Sum)
            # Looked at where it can be so alone: reading the sum waits for a GPU.
            if self.training and count < 2 and total[-1] < 2:
                raise ValueError(
                    f"an input of shape {tuple(input.shape)} leaves one value per channel over all "
                    "processes, and training needs 2 or more: use larger batches"
                )
            mean, count = total[:-1] / total[-1], total[-1].detach()
            shape = [1, -1] + [1] * (input.dim() - 2)
            centred = wide - mean.view(shape)
            # Of centred values, in a second reduction: a difference of large squares loses digits.
            variance = allreduce(centred.square().sum(over), op=Sum) / count
            if self.training and self.track_running_stats:
                self._track(mean.detach(), (variance * count / (count - 1)).detach())
            result = centred * torch.rsqrt(variance + self.eps).view(shape)
            if self.affine:
                result = result * self.weight.view(shape) + self.bias.view(shape)
            return result.to(input.dtype)

        def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
            self.num_batches_tracked.add_(1)
            factor = self.momentum
            if factor is None:  # the average of all batches
                factor = 1.0 / float(self.num_batches_tracked)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_(variance.to(self.running_var.dtype), factor)

    return SyncBatchNorm


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNorm":
        return sync_batch_norm()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
