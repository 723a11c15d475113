"""A strategy of Lightning's that averages gradients by `sparkdl.horovod.torch`.

Runs in: child

https://lightning.ai/docs/pytorch/stable/extensions/strategy.html
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib import import_module
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.spark.torch.modules import multiply_rates


class _Horovod:
    """The methods, over a `ParallelStrategy` of one of Lightning's packages.

    Optimizers step by the averages of all processes, at as many times the learning rate.
    Checkpoints have the rate of one process.
    """

    strategy_name = "horovod"
    _hvd: Any
    _states: list[dict[str, Any]]
    _device: Any
    _stack: ExitStack
    _own: list[Any]
    _package: str

    @property
    def root_device(self) -> Any:
        return self._device

    @property
    def global_rank(self) -> int:
        return int(self._hvd.rank())

    @property
    def local_rank(self) -> int:
        return int(self._hvd.local_rank())

    @property
    def node_rank(self) -> int:
        return int(self._hvd.cross_rank())

    @property
    def world_size(self) -> int:
        return int(self._hvd.size())

    def model_to_device(self) -> None:
        self.model.to(self._device)  # type: ignore[attr-defined]

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)  # type: ignore[misc]
        optimizers: list[Any] = self.optimizers  # type: ignore[has-type]
        if not optimizers:
            return
        for optimizer, state in zip(optimizers, self._states, strict=False):
            optimizer.load_state_dict(state)
        for optimizer in optimizers:
            multiply_rates(optimizer.param_groups, self.world_size)
        for config in self.lr_scheduler_configs:  # type: ignore[attr-defined]
            if (rates := getattr(config.scheduler, "base_lrs", None)) is not None:
                # Schedulers have noted the rates before they were multiplied.
                config.scheduler.base_lrs = [rate * self.world_size for rate in rates]
        module = self.lightning_module  # type: ignore[attr-defined]
        self._hvd.broadcast_parameters(module.state_dict(), root_rank=0)
        for optimizer in optimizers:
            self._hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        # After the broadcasts, which need the optimizers themselves.
        self.optimizers = [self._distributed(o, trainer) for o in optimizers]
        for optimizer in optimizers:
            optimizer._opt_called = True  # schedulers look whether the one they know has stepped

    def _distributed(self, optimizer: Any, trainer: Any) -> Any:
        ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
        named = self.lightning_module.named_parameters()  # type: ignore[attr-defined]
        own = [(name, param) for name, param in named if id(param) in ids]
        if len(own) < len(ids):
            raise ConfigError(
                "configure_optimizers made an optimizer of parameters that are not the module's: "
                "make it of self.parameters()"
            )
        passes = trainer.accumulate_grad_batches
        made = self._hvd.DistributedOptimizer(optimizer, own, backward_passes_per_step=passes)
        # For all steps: `post_backward` synchronizes, so that gradients are clipped after it.
        self._stack.enter_context(made.skip_synchronize())
        self._own.append(made)
        return made

    def post_backward(self, closure_loss: Any) -> None:
        """Wait for the averages, before gradients are clipped and the optimizer steps."""
        trainer = self.lightning_module.trainer  # type: ignore[attr-defined]
        if not trainer.fit_loop._should_accumulate():
            for optimizer in self._own:
                optimizer.synchronize()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        state: dict[str, Any] = super().optimizer_state(optimizer)  # type: ignore[misc]
        groups = [dict(group) for group in state["param_groups"]]
        multiply_rates(groups, 1 / self.world_size)
        return {**state, "param_groups": groups}

    def barrier(self, name: str | None = None) -> None:
        self._hvd.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._hvd.broadcast_object(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        import torch

        if not isinstance(tensor, torch.Tensor):
            return tensor
        word = str(reduce_op or "mean").lower().rpartition(".")[2]
        is_mean = word in ("mean", "avg", "average")
        if is_mean and not tensor.is_floating_point():
            # A mean of whole numbers would be rounded.
            tensor = tensor.float()
        return self._hvd.allreduce(tensor, op=self._hvd.Average if is_mean else self._hvd.Sum)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        return self._hvd.allgather(tensor.unsqueeze(0))

    def teardown(self) -> None:
        self._stack.close()
        # ParallelStrategy's own `teardown` would also delete environment variables.
        import_module(f"{self._package}.strategies").Strategy.teardown(self)


def strategy(package: str, hvd: Any, device: Any, states: list[dict[str, Any]]) -> Any:
    """Return the strategy for a trainer.

    Args:
        package: `lightning.pytorch` or `pytorch_lightning`.
        hvd: `sparkdl.horovod.torch`, initialized.
        states: of the optimizers, from a checkpoint.
    """
    base = import_module(f"{package}.strategies").ParallelStrategy
    made: Any = type("HorovodStrategy", (_Horovod, base), {"_package": package})()
    made._hvd, made._device, made._states = hvd, device, states
    made._stack, made._own = ExitStack(), []
    return made
