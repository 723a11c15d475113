"""A callback that makes checkpoints while `fit` trains, and resumes from the last one.

Keras 3, with each of its backends, writes model and optimizer itself, by `save_weights`: into
memory, from where a thread writes the file while the training continues.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from sparkdl.core.errors import CheckpointError, ConfigError
from sparkdl.core.files import scratch_folder
from sparkdl.core.spec import DEFAULT_FEED
from sparkdl.datasets.keras_epochs import FEEDS, patch_fit_for_feeds
from sparkdl.frameworks.keras import spans_workers

_log = logging.getLogger(__name__)
_PROGRESS = "training.json"


class Progress(msgspec.Struct, frozen=True):
    """Batches of all epochs that the model was trained on, and the epoch to continue."""

    step: int = 0
    epoch: int = 0


def callback_for(
    ctx: Any,
    every_steps: int | None = None,
    every_epochs: int | None = None,
    also: Callable[[Path], None] | None = None,
) -> Any:
    """Return the callback; `also` writes more files into the folder, on rank 0."""
    _check_every(every_steps=every_steps, every_epochs=every_epochs)
    if every_steps is None and every_epochs is None:
        every_epochs = 1
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        raise ConfigError(
            "TF_USE_LEGACY_KERAS is set, and sparkdl.keras.Checkpoint saves only models of "
            "Keras 3: leave it out, or save in your own callback by ctx.checkpoint(step)"
        )
    base: Any = import_module("keras").callbacks.Callback
    patch_fit_for_feeds()
    saver = _Saver(ctx, every_steps, every_epochs, also)

    class Checkpoint(base):  # type: ignore[misc]
        @property
        def initial_epoch(self) -> int:
            return saver.begun.epoch

        def on_train_begin(self, logs: Any = None) -> None:
            saver.train_begin(self.model)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            saver.epoch_begin(epoch, (self.params or {}).get("steps") is not None)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            saver.batch_end(self.model, batch)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            saver.epoch_end(self.model, epoch)

        def on_train_end(self, logs: Any = None) -> None:
            ctx._checkpoints.await_in_flight()

    setattr(Checkpoint, FEEDS, lambda self, feeds: saver.train_on(feeds))
    return Checkpoint()


def _check_every(**given: int | None) -> None:
    for name, every in given.items():
        if every is not None and (type(every) is not int or every < 1):
            raise ConfigError(f"{name}={every!r} must be a whole number, 1 or more")


class _Saver:
    """Counts the batches of its feeds that `fit` has trained on, which Keras reads ahead."""

    def __init__(
        self,
        ctx: Any,
        every_steps: int | None = None,
        every_epochs: int | None = None,
        also: Callable[[Path], None] | None = None,
    ) -> None:
        self._ctx, self._also = ctx, also
        self._every_steps = every_steps
        self._every_epochs = every_epochs
        last = ctx.last_checkpoint
        self._folder = last.folder if last else None
        self.begun = _read_progress(self._folder) if self._folder else Progress()
        self._step = self._saved = self.begun.step
        """Before the epoch that is under way; at the last checkpoint."""
        self._epoch: int | None = None
        self._has_length = False
        self._feeds: list[str] | None = None
        """The feeds of `fit`; `None` where it does not say them."""
        self._given: dict[str, int] = ctx.batches_given()
        """By feed, before the current epoch."""
        self._in_epoch = 0
        """Batches by Keras' own count."""

    def train_on(self, feeds: list[str]) -> None:
        self._feeds = list(dict.fromkeys(feeds))

    def _read(self) -> list[str]:
        given, feeds = self._ctx.batches_given(), self._feeds
        if feeds is None:
            feeds = [DEFAULT_FEED if DEFAULT_FEED in given else min(given, default=DEFAULT_FEED)]
        return [feed for feed in feeds if given.get(feed)]

    def _there(self, feeds: list[str]) -> int:
        given: dict[str, int] = self._ctx.batches_given()
        return min(given[feed] - self._given.get(feed, 0) for feed in feeds)

    def _used(self) -> int:
        """Return how many batches of the epoch the model was trained on.

        Keras counts whole executions, and the last of an epoch may have had fewer steps.
        """
        feeds = self._read()
        return min(self._in_epoch, self._there(feeds)) if feeds else self._in_epoch

    def _counts(self) -> dict[str, int]:
        used = self._used()
        return {feed: self._given.get(feed, 0) + used for feed in self._read()}

    def train_begin(self, model: Any) -> None:
        if self._folder is not None:
            _restore(model, _file(self._folder, model, self._ctx))
            _log.info("Training resumes at step %d, epoch %d", self.begun.step, self.begun.epoch)
            self._folder = None

    def epoch_begin(self, epoch: int, has_length: bool) -> None:
        if self._epoch is None and epoch != self.begun.epoch:
            raise ConfigError(
                f"fit begins at epoch {epoch}, but the checkpoint continues at epoch "
                f"{self.begun.epoch}: call model.fit(..., initial_epoch=checkpoint.initial_epoch)"
            )
        if has_length and self._every_steps:
            raise ConfigError(
                f"every_steps={self._every_steps}: an epoch of a fixed number of steps starts "
                "again after a failure, and steps would be taken twice. Save with every_epochs=1, "
                "or train on ctx.dataset(...) without steps_per_epoch"
            )
        self._epoch, self._has_length = epoch, has_length
        self._in_epoch = 0

    def batch_end(self, model: Any, batch: int) -> None:
        self._in_epoch = batch + 1
        every, step = self._every_steps, self._step + self._used()
        # Keras may count several steps at once, so a multiple of `every` may be stepped over.
        if every and step // every > self._saved // every:
            self._save(model, Progress(step, self._epoch or 0))

    def epoch_end(self, model: Any, epoch: int) -> None:
        if not self._has_length and (feeds := self._read()):
            self._in_epoch = self._there(feeds)
        step = self._step + self._used()
        every = self._every_epochs
        if every and (epoch + 1) % every == 0 and step > self._saved:
            self._save(model, Progress(step, epoch + 1))
        self._step = step
        self._given, self._in_epoch = {**self._ctx.batches_given(), **self._counts()}, 0

    def _save(self, model: Any, progress: Progress) -> None:
        with self._ctx.checkpoint_async(progress.step, self._counts()) as saving:
            if self._ctx.rank == 0:
                (saving.folder / _PROGRESS).write_bytes(msgspec.json.encode(progress))
                if self._also is not None:
                    self._also(saving.folder)
            # Reading some variables needs all workers, so the others save too, to a scratch folder.
            with scratch_folder() as private:
                path = _file(saving.folder, model, self._ctx, private)
                copy = _Copy(path)
                model.save_weights(copy)
            if path.parent == saving.folder:
                saving.until(copy.write_out)
        self._saved = progress.step


class _Copy(io.BytesIO):
    """A model's file in memory, with its name, at which an old Keras 3 writes it at once."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def write_out(self) -> None:
        with self.getbuffer() as content:
            if content.nbytes:
                self._path.write_bytes(content)


def _read_progress(folder: Path) -> Progress:
    try:
        return msgspec.json.decode((folder / _PROGRESS).read_bytes(), type=Progress)
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise CheckpointError(
            f"{folder} was not made by sparkdl.keras.Checkpoint: {error}. Load "
            "ctx.last_checkpoint yourself, or choose another checkpoint_dir"
        ) from error


def _file(folder: Path, model: Any, ctx: Any, private: Path | None = None) -> Path:
    """Return where the model's file is; in `private`, what another node writes as well."""
    if ctx.num_workers == 1:
        return folder / "model.weights.h5"
    if not spans_workers(_strategy(model)):
        return folder / f"model-{ctx.rank}.weights.h5"
    return (folder if ctx.rank == 0 or private is None else private) / "model.weights.h5"


def _strategy(model: Any) -> Any:
    return getattr(model, "_distribute_strategy", None)


def _restore(model: Any, path: Path) -> None:
    """Load model and optimizer, whose variables must be there before."""
    strategy = _strategy(model)
    try:
        with nullcontext() if strategy is None else strategy.scope():
            # An optimizer makes its variables at its first step: there are none to fill before.
            model.optimizer.build(model.trainable_variables)
        model.load_weights(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} does not fit the model: {error}. Build and compile the same model as before, "
            "or choose another checkpoint_dir"
        ) from error
