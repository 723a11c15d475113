"""The input of a training's processes, and their results, which pass through the store.

Runs in: child, driver
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from sparkdl.core.scratch import scratch_folder
from sparkdl.horovod.spark.common.datamodule import (
    ParquetDataModule,
    batch_sizes,
    rows_each,
)
from sparkdl.horovod.spark.common.store import AbstractFilesystemStore
from sparkdl.horovod.spark.common.util import say
from sparkdl.storage.parquet.source import ParquetSource


@dataclass(frozen=True)
class Work:
    """A training, as each of its processes sees it.

    Models travel as files of the store, since tasks and results of Spark are limited in size.

    Attributes:
        folder: in the store, for the model before (`start`) and after (`result`).
        dirs: the folders of training and validation rows.
        params: the estimator's parameters.
    """

    store: AbstractFilesystemStore
    run_id: str
    folder: str
    dirs: tuple[str, str]
    train: ParquetSource
    val: ParquetSource | None
    params: SimpleNamespace

    def start(self) -> None:
        """Apply the settings that must come before anything else in a process."""
        if self.params.mp_start_method:
            # Forced, because Python refuses to set it a second time.
            multiprocessing.set_start_method(self.params.mp_start_method, force=True)

    @contextmanager
    def received(self, name: str) -> Iterator[Path]:
        """Yield a file that the other side has sent, as a local one."""
        with scratch_folder() as folder:
            self.store.download(f"{self.folder}/{name}", folder / name)
            yield folder / name

    def send(self, local: Path, name: str) -> None:
        """Send a local file to the other side."""
        self.store.upload(local, f"{self.folder}/{name}")

    def steps(self, size: int) -> tuple[int, int]:
        """Return the batches of an epoch and of a validation, of `size` processes each."""
        params = self.params
        train = params.train_steps_per_epoch or _steps(self.train, size, params.batch_size)
        if self.val is None:
            return train, 0
        batch_size = params.val_batch_size or params.batch_size
        return train, params.validation_steps_per_epoch or _steps(self.val, size, batch_size)

    def rows(self, rank: int, size: int) -> ParquetDataModule:
        """Return what reads a process's rows."""
        params = self.params
        return ParquetDataModule(
            self.train,
            self.val,
            cur_shard=rank,
            shard_count=size,
            train_batch_size=params.batch_size,
            val_batch_size=params.val_batch_size or params.batch_size,
            shuffle=params.shuffle and params.shuffle_buffer_size != 0,
            random_seed=params.random_seed,
            transform_fn=params.transformation_fn,
            inmemory_cache_all=params.inmemory_cache_all,
            sample_weight_col=params.sample_weight_col,
        )

    def describe(self, size: int) -> None:
        """Print the planned rows and batches."""
        train, val = self.steps(size)
        rows = f"{self.train.num_rows} rows in {train} batches of {self.params.batch_size} at most"
        more = f", validation of {self.val.num_rows} rows in {val} batches" if self.val else ""
        say(f"Run {self.run_id}: {size} processes, {self.params.epochs} epochs, {rows}{more}")


def _steps(source: ParquetSource, size: int, batch_size: int) -> int:
    return len(batch_sizes(rows_each(source.num_rows, size), batch_size))
