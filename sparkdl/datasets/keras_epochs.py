"""Keras follows its feed: an epoch is as long as it is fed, and there are as many as are fed.

Keras does not know the length of a stream, so it takes all epochs for as long as the first one, and
trains as many as `epochs` says. But an epoch that continues after a failure is shorter than those
after it, each `cluster.feed` may bring more rows than the one before, and a feed may end before
`fit` does. An epoch of no batches has a loss of 0.0, the best there is. Therefore

- each epoch of a feed is read to its end;
- with `steps_per_epoch` an epoch is so many batches, over the ends of the feed's epochs;
- `fit` ends with a warning when its feed has ended, as Keras does with other data that runs out;
- callbacks and history do not see an epoch of no rows;
- `fit`, `evaluate` and `predict` that find no epoch at all raise `EndOfFeedError`;
- when `stop_training` has ended `fit`, its feeds end: the remaining rows are not read.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.patch import Function, Patch
from sparkdl.datasets.tensorflow import batches_of, readers_of
from sparkdl.feed.reader.reader import FeedReader

_log = logging.getLogger(__name__)
_STEPS = "_sparkdl_steps"
"""Attribute of Keras' iterator: how many batches its feeds had given as it began."""
_RUN = "_sparkdl_run"
FEEDS = "_sparkdl_feeds"
"""Method of a callback that takes the names of the feeds that `fit` trains on, as it begins."""


def patch_fit_for_feeds() -> None:
    """Patch Keras 3, where imported, to follow its feeds. Idempotent."""
    if "tf_keras" in sys.modules:
        _warn_of("this is tf_keras, and sparkdl supports only Keras 3")
    if "keras" not in sys.modules:
        return
    found = patches()
    # All patches or none: half of them would count epochs and not end them.
    if objections := [text for patch in found if (text := patch.objection())]:
        _warn_of(objections[0])
        return
    for patch in found:
        patch.apply()


@cache
def _warn_of(reason: str) -> None:
    _log.warning(
        "fit cannot follow its feed: every epoch must have as many rows as the first, and fit "
        "must run as many epochs as are fed: %s",
        reason,
    )


@dataclass
class _Run:
    """A `fit` that reads feeds; its callbacks and its iterator over the training data have it.

    Attributes:
        batches: of this epoch that callbacks have seen.
        has_rows: whether the epoch that has ended had any.
        has_ended: whether `fit` ends because a feed has.
    """

    iterator: Any
    readers: list[FeedReader]
    batches: int = 0
    has_rows: bool = True
    has_ended: bool = False


_begun: ContextVar[Any] = ContextVar("sparkdl_begun", default=None)
"""The callbacks of a `fit` whose next step, in this thread, is to iterate over its data."""


def patches() -> tuple[Patch, ...]:
    """Return the changes to Keras 3, which has been imported."""
    backend = import_module("keras").backend.backend()
    names = {"tensorflow": "TensorFlowTrainer", "jax": "JAXTrainer", "torch": "TorchTrainer"}
    fit = f"keras.src.backend.{backend}.trainer:{names.get(backend, 'Trainer')}.fit"
    iterator = "keras.src.trainers.epoch_iterator:EpochIterator"
    callbacks = "keras.src.callbacks.callback_list:CallbackList"
    return (
        Patch(fit, ("self", "x"), _fit, ("stop_training",)),
        Patch(f"{iterator}.__iter__", ("self",), _begin),
        Patch(f"{iterator}.catch_stop_iteration", ("self",), _catch, ("_num_batches",)),
        Patch(f"{iterator}._interrupted_warning", ("self",), _warn),
        Patch(f"{callbacks}.on_epoch_begin", ("self",), _before),
        Patch(f"{callbacks}.on_train_batch_end", ("self", "batch", "logs"), _count),
        Patch(f"{callbacks}.on_epoch_end", ("self", "epoch", "logs"), _epoch_ended),
        Patch(f"{callbacks}.on_train_end", ("self", "logs"), _train_ended),
    )


def _continues(iterator: Any) -> bool:
    """Whether Keras continues with the iterator over the data that it has."""
    # It forgets one that is at its end.
    has_one = hasattr(iterator, _STEPS) and iterator._current_iterator is not None
    return bool(iterator.steps_per_epoch) and has_one


def _begin(stock: Function, iterator: Any) -> Any:
    """Begin to iterate over an epoch, unless Keras continues one."""
    readers = _readers(iterator)
    callbacks = _begun.get()
    # Once: a validation within `fit` begins an iterator too, and is no training.
    _begun.set(None)
    if callbacks is not None:
        for callback in callbacks.callbacks:
            getattr(callback, FEEDS, len)([reader.feed for reader in readers])
    if readers and callbacks is not None:
        readers[0].registry.watch.fit_begins(callbacks.model, readers[0].feed)
        setattr(callbacks, _RUN, _Run(iterator, readers))
        setattr(iterator, _RUN, getattr(callbacks, _RUN))
    if not _continues(iterator):
        for reader in readers:
            if not reader.has_epoch():
                raise reader.end_of_feed()
    setattr(iterator, _STEPS, _steps(readers))
    return stock(iterator)


def _warn(stock: Function, iterator: Any) -> None:
    """Warn, unless a feed's epoch has ended: Keras, which knows no length, warns too."""
    if iterator.steps_per_epoch or not _readers(iterator):
        stock(iterator)


@contextmanager
def _catch(stock: Function, iterator: Any) -> Iterator[None]:
    """Note the end of an iteration."""
    before, has_ended = iterator._num_batches, False
    with stock(iterator):
        try:
            yield
        except Exception:
            has_ended = True
            raise
    readers = _readers(iterator)
    if not readers:
        return
    if has_ended:
        for reader in readers:
            reader.reach_end()
    # Keras has set it to the length of this epoch, and would read the next ones no further.
    if before is None:
        iterator._num_batches = None
    has_rows = not has_ended or _steps(readers) != getattr(iterator, _STEPS)
    if run := getattr(iterator, _RUN, None):
        run.has_rows = has_rows or run.batches > 0
    elif not has_rows and not iterator.steps_per_epoch:
        names = ", ".join(repr(reader.feed) for reader in readers)
        raise ConfigError(
            f"this epoch of feed {names} has no rows, so there is nothing to evaluate or "
            "predict. Feed rows for each epoch in which it is read"
        )


def _epoch_ended(stock: Function, callbacks: Any, epoch: int, logs: Any = None) -> None:
    """Call the callbacks for an epoch that had rows; end `fit` after the last epoch."""
    run, model = getattr(callbacks, _RUN, None), callbacks.model
    if run is None or run.has_rows or model.stop_training:
        stock(callbacks, epoch, logs)
    else:
        _log.warning(
            "Epoch %d of fit had no rows; its callbacks were skipped. Feed each epoch at "
            "least one row for each node",
            epoch + 1,
        )
    if run is None:
        return
    run.batches = 0
    setattr(run.iterator, _STEPS, _steps(run.readers))
    epochs = (callbacks.params or {}).get("epochs", 0)
    if model.stop_training or epoch + 1 >= epochs or _continues(run.iterator):
        return
    if ended := [reader for reader in run.readers if not reader.has_epoch()]:
        model.stop_training = run.has_ended = True
        ended[0].report_extra_epoch()
        _log.warning(
            "Your input ran out of data; interrupting training: feed %r has ended before epoch %d "
            "of %d. Give cluster.feed and fit the same epochs=…",
            ended[0].feed,
            epoch + 2,
            epochs,
        )


def _fit(stock: Function, model: Any, *args: Any, **kwargs: Any) -> Any:
    """End the feeds of an early stop that callbacks do not know of; train nothing without rows."""
    bound = inspect.signature(stock).bind(model, *args, **kwargs)
    given = bound.arguments
    readers = readers_of(given.get("x"))
    if any(reader.registry.is_resumed and not reader.has_epoch() for reader in readers):
        _log.warning(
            "fit has no rows left to train on: an earlier run has used them all. Choose another "
            "checkpoint_dir to train again"
        )
        # By its own rules `fit` runs no epoch then.
        given["initial_epoch"] = given.get("epochs", 1)
    with _steps_of_feed(model, given):
        history = stock(*bound.args, **bound.kwargs)
    if model.stop_training:
        _terminate([r for r in readers_of(given.get("validation_data")) if r not in readers])
    return history


@contextmanager
def _steps_of_feed(model: Any, given: dict[str, Any]) -> Iterator[None]:
    """Have the feed end an epoch after `steps_per_epoch` batches, in place of Keras.

    Keras reads on behind them in the next epoch, and finds an epoch of the feed that has just ended
    to be one without batches.
    """
    steps, batches = given.get("steps_per_epoch"), batches_of(given.get("x"))
    if batches is None or not isinstance(steps, int) or steps < 1:
        yield
        return
    before, batches.steps = batches.steps, steps
    given["steps_per_epoch"] = None
    try:
        yield
    finally:
        batches.steps = before


def _before(stock: Function, callbacks: Any, *args: Any, **kwargs: Any) -> None:
    stock(callbacks, *args, **kwargs)
    if not hasattr(callbacks, _RUN):
        _begun.set(callbacks)


def _count(stock: Function, callbacks: Any, batch: int, logs: Any = None) -> None:
    if run := getattr(callbacks, _RUN, None):
        run.batches += 1
    stock(callbacks, batch, logs)


def _train_ended(stock: Function, callbacks: Any, logs: Any = None) -> None:
    stock(callbacks, logs)
    if run := getattr(callbacks, _RUN, None):
        delattr(callbacks, _RUN)
        # `has_ended` means that the feed ended `fit`, and not that `fit` stopped early.
        if callbacks.model.stop_training and not run.has_ended:
            _terminate(run.readers)


def _terminate(readers: list[FeedReader]) -> None:
    for reader in dict.fromkeys(readers):
        _log.warning("fit has stopped early, so feed %r ends", reader.feed)
        reader.terminate()


def _steps(readers: list[FeedReader]) -> list[int]:
    return [reader.steps for reader in readers]


def _readers(iterator: Any) -> list[FeedReader]:
    """Return the readers of what an iterator of Keras reads: a dataset, or PyTorch's DataLoader."""
    adapter = iterator.data_adapter
    return readers_of(getattr(adapter, "_dataset", getattr(adapter, "_dataloader", None)))
