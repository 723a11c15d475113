"""Horovod's callbacks for Keras 3.

A callback must be a subclass of Keras' `Callback`, and Keras is imported on first use. `_made`
therefore makes them of the mixins here. https://horovod.readthedocs.io/en/v0.28.1/api.html#module-horovod.keras
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.namesakes import missing_name
from sparkdl.horovod.common import group_of, rank, size
from sparkdl.horovod.common.process_sets import log_to_driver, report_step
from sparkdl.horovod.tensorflow.mpi_ops import broadcast_variables
from sparkdl.horovod.tensorflow.optimizer import build

_log = logging.getLogger(__name__)


class Broadcast:
    """Gives all members the weights and the optimizer's variables of one, as `fit` begins.

    If the first batch builds the model, it gets them afterwards. Each batch is reported to the
    driver, as by `ctx.report`.

    Args:
        root_rank: of the member whose values count.
        device: accepted for Horovod's sake.
    """

    model: Any

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.broadcast_done and self.model.built:
            # Keras makes these with the first step: members would begin with different ones.
            build(self.model.optimizer, self.model.trainable_variables)
            self._send()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.broadcast_done:
            self._send()
        self._batches += 1
        report_step(self._batches)

    def _send(self) -> None:
        self.broadcast_done = True
        variables = [*self.model.weights, *self.model.optimizer.variables]
        broadcast_variables(variables, self.root_rank)


class MetricAverage:
    """Replaces the metrics of each epoch by their mean over all members.

    It must stand before callbacks that use them, such as ReduceLROnPlateau.

    Args:
        device: accepted for Horovod's sake.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # Sorted, because members may have logged them in different orders.
        names = sorted(logs or {})
        if logs is None or not names:
            return
        group = group_of()
        if group.size == 1:
            return
        import torch

        # All in one reduction, and in float64, which holds counts exactly.
        values = torch.tensor([float(logs[name]) for name in names], dtype=torch.float64)
        means = group.all_reduce_(values, what=f"the metrics {', '.join(names)}")
        logs.update(zip(names, means.tolist(), strict=True))


class Schedule:
    """Sets the learning rate, by epoch or by batch.

    Args:
        initial_lr: the rate to multiply.
        multiplier: of `initial_lr`, by epoch; a number `m` stands for `m ** (epoch - start_epoch)`.
        start_epoch, end_epoch: the first epoch of the schedule, and the first one after it.
        staircase: by whole epochs; otherwise by parts of an epoch, batch by batch.
        momentum_correction: ignored: the momentum of Keras 3 cannot be changed. A log line warns
            if the optimizer has one.
        steps_per_epoch: if Keras does not know it.

    Raises:
        ConfigError: without `initial_lr`; in `fit`, if the steps of an epoch are not known.
    """

    model: Any
    params: dict[str, Any]

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ConfigError(f"{type(self).__name__} needs initial_lr, the rate to multiply")
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            factor = float(multiplier)
            self.multiplier = lambda epoch: factor ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ConfigError(
                    f"{type(self).__name__} does not know how many steps an epoch has: give it "
                    "steps_per_epoch, or give that to fit"
                )
        if self.momentum_correction and getattr(self.model.optimizer, "momentum", None):
            _log.warning(
                "momentum_correction is ignored: the momentum of %s cannot be changed. Give "
                "momentum_correction=False",
                type(self.model.optimizer).__name__,
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._set(epoch + batch / (self.steps_per_epoch or 1))
        elif batch == 0:
            self._set(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = number(self.model.optimizer.learning_rate)

    def _set(self, epoch: float) -> None:
        self.model.optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)


class Warmup(Schedule):
    """Raises the learning rate from `initial_lr / size()` to `initial_lr` over some epochs.

    Goyal et al., 2017 (https://arxiv.org/abs/1706.02677), section 2.2.

    Args:
        initial_lr: the rate to reach: that of one member times `hvd.size()`.
        warmup_epochs: how many epochs it takes.
        momentum_correction, steps_per_epoch: see `LearningRateScheduleCallback`.
        verbose: 1 to say when it is done.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # By the end of the batch, so that the last one of the warm-up reaches the full rate.
            done = (epoch + 1.0 / (self.steps_per_epoch or 1)) / warmup_epochs
            return (done * (size() - 1) + 1) / size()

        options = (0, int(warmup_epochs), False, momentum_correction, steps_per_epoch)
        super().__init__(initial_lr, multiplier, *options)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch == (self.end_epoch or 0) - 1 and rank() == 0:
            rate = number(self.model.optimizer.learning_rate)
            _log.warning("epoch %d: the learning rate has warmed up to %g", epoch + 1, rate)


def number(value: Any) -> float:
    """Return what a variable, a tensor or a number holds, as a float."""
    import tensorflow as tf

    return float(tf.convert_to_tensor(value).numpy())


class Log:
    """Sends what `fit` reports to the driver: the metrics of each epoch. Databricks' callback.

    Args:
        per_batch_log: whether to send those of each batch, too.
    """

    def __init__(self, per_batch_log: bool = False) -> None:
        super().__init__()
        self._has_batches = per_batch_log
        self._began_s = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._began_s = time.monotonic()
        log_to_driver(f"Epoch {epoch} begins")

    def on_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._has_batches:
            log_to_driver(f"Batch {batch}: {_metrics(logs)}")

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        took_s = time.monotonic() - self._began_s
        log_to_driver(f"Epoch {epoch} ended after {took_s:.1f} s: {_metrics(logs)}")


def _metrics(logs: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name}={float(value):.6g}" for name, value in (logs or {}).items())


_MIXINS: dict[str, type[Any]] = {
    "BroadcastGlobalVariablesCallback": Broadcast,
    "LearningRateScheduleCallback": Schedule,
    "LearningRateWarmupCallback": Warmup,
    "LogCallback": Log,
    "MetricAverageCallback": MetricAverage,
}


@functools.cache
def _made(name: str) -> type[Any]:
    import keras

    mixin = _MIXINS[name]
    return type(name, (mixin, keras.callbacks.Callback), {"__doc__": mixin.__doc__})


def __getattr__(name: str) -> Any:
    return _made(name) if name in _MIXINS else missing_name(__name__, name)
