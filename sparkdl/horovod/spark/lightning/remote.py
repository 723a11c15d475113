"""The training of a `LightningModule` in one of several processes.

Runs in: child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/lightning/remote.py
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.scratch import scratch_folder
from sparkdl.horovod.spark.common.util import say
from sparkdl.horovod.spark.common.work import Work
from sparkdl.horovod.spark.lightning.strategy import strategy
from sparkdl.horovod.spark.torch.modules import load_start
from sparkdl.horovod.spark.torch.remote import chosen_device


@dataclass(frozen=True)
class LightningTrainer:
    """The training function of each process.

    Attributes:
        package: `lightning.pytorch` or `pytorch_lightning`.
    """

    work: Work
    package: str

    def __call__(self) -> dict[str, float] | None:
        """Train; return the last logged metrics, on rank 0."""
        self.work.start()
        import torch

        import sparkdl.horovod.torch as hvd

        lightning = import_module(self.package)
        hvd.init()
        if self.work.params.random_seed is not None:
            lightning.seed_everything(self.work.params.random_seed)
        is_root = hvd.rank() == 0
        with self.work.received("start") as file:
            start = load_start(file)
        module = start["model"]
        with scratch_folder() as folder:
            saver, callbacks = self._callbacks(lightning, folder, is_root)
            device = chosen_device(hvd, self.work.params.use_gpu)
            plan = strategy(self.package, hvd, device, start["states"])
            trainer = lightning.Trainer(
                **self._options(lightning, hvd, folder, callbacks, device), strategy=plan
            )
            if is_root and self.work.params.verbose:
                self.work.describe(hvd.size())
            with self._rows(hvd) as rows:
                trainer.fit(module, **rows)
            if not is_root:
                return None
            # A checkpoint of the user's own may be of an earlier, better epoch.
            best = saver.best_model_path if saver in self.work.params.callbacks else ""
            state = torch.load(best, "cpu", weights_only=False)["state_dict"] if best else None
            torch.save(state or module.cpu().state_dict(), folder / "result")
            self.work.send(folder / "result", "result")
            if self.work.store.saving_runs():
                self.work.store.sync_fn(self.work.run_id)(str(folder / "run"))
            return {name: float(value) for name, value in trainer.logged_metrics.items()}

    def _callbacks(self, lightning: Any, folder: Path, is_root: bool) -> tuple[Any, list[Any]]:
        params, store = self.work.params, self.work.store
        saver_class = lightning.callbacks.ModelCheckpoint
        own = [each for each in params.callbacks if isinstance(each, saver_class)]
        saver = own[0] if own else saver_class()
        # A local folder, whose files `sync_fn` copies into the store.
        saver.dirpath, saver.filename = str(folder / "run"), store.get_checkpoint_filename()
        found = [*params.callbacks, *([] if own else [saver])]
        if params.terminate_on_nan:
            found.append(_hook(lightning, "on_train_batch_end", _refuse_nan))
        if is_root and store.saving_runs():
            sync = store.sync_fn(self.work.run_id)
            found.append(
                _hook(lightning, "on_train_epoch_end", lambda *_: sync(str(folder / "run")))
            )
        return saver, found

    def _options(
        self, lightning: Any, hvd: Any, folder: Path, callbacks: list[Any], device: Any
    ) -> dict[str, Any]:
        params = self.work.params
        train, val = self.work.steps(hvd.size())
        logs = folder / "run" / self.work.store.get_logs_subdir()
        return {
            "accelerator": "cpu" if device.type == "cpu" else "gpu",
            "devices": 1,
            "callbacks": callbacks,
            "max_epochs": params.epochs,
            "logger": params.logger or _logger(lightning, logs),
            "log_every_n_steps": params.log_every_n_steps,
            # A look at validation batches before the training would take them from the stream.
            "num_sanity_val_steps": 0,
            # The batches of a data module have no end.
            "limit_train_batches": train,
            "limit_val_batches": val,
            "enable_progress_bar": False,
            "enable_model_summary": bool(params.verbose),
            # The rows are this process's share already.
            "use_distributed_sampler": False,
            "profiler": params.profiler,
            "default_root_dir": str(folder),
            **(params.trainer_args or {}),
        }

    @contextmanager
    def _rows(self, hvd: Any) -> Iterator[dict[str, Any]]:
        """Give the arguments of `Trainer.fit` that bring rows."""
        steps, val_steps = self.work.steps(hvd.size())
        with self.work.rows(hvd.rank(), hvd.size()) as rows:
            found: dict[str, Any] = {"train_dataloaders": _Loader(rows.train_data(), steps)}
            if self.work.val is not None:
                found["val_dataloaders"] = _Loader(rows.val_data(), val_steps)
            yield found


class _Loader:
    """Yields the next batches of a stream as tensors: an epoch."""

    def __init__(self, batches: Iterator[Any], steps: int) -> None:
        self._batches, self._steps = batches, steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        import torch

        for batch in itertools.islice(self._batches, self._steps):
            tensors = {name: torch.tensor(values) for name, values in batch.items()}
            # Doubles as well, because weights are float32 as a rule.
            yield {n: x.float() if x.is_floating_point() else x for n, x in tensors.items()}


def _logger(lightning: Any, folder: Path) -> Any:
    try:
        return lightning.loggers.TensorBoardLogger(str(folder), name="", version="")
    except ModuleNotFoundError:
        say("No logs for TensorBoard: the package tensorboard is not installed")
        return False


def _hook(lightning: Any, name: str, function: Any) -> Any:
    made = lightning.Callback()
    setattr(made, name, function)
    return made


def _refuse_nan(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    loss = outputs["loss"] if isinstance(outputs, dict) else outputs
    if loss is not None and not math.isfinite(float(loss)):
        raise ConfigError(
            f"the loss of batch {batch_idx} is {float(loss)}, and terminate_on_nan is set: reduce "
            "the learning rate, or clip gradients"
        )
