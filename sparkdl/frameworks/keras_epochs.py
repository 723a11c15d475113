"""Keras follows its feed: an epoch is as long as it is fed, and there are as many as are fed.

Runs in: child

Keras does not know the length of a stream, so it takes all epochs for as long as the first one, and
trains as many as it was told. But an epoch that goes on after a failure is shorter than those after
it, each `cluster.feed` may bring more rows than the one before, and a feed may end before `fit`
does. An epoch of no batches has a loss of 0.0, the best there is. So

- each epoch of a feed is read to its end;
- `fit` ends with a warning when its feed has ended, as Keras does with other data that runs out;
- callbacks and history are not told of an epoch of no rows;
- `fit`, `evaluate` and `predict` that find no epoch at all raise `EndOfFeedError`;
- when `stop_training` has ended `fit`, its feeds end: nobody reads the rest of them.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.feed.dataset import readers_of
from sparkdl.feed.reader import FeedReader
from sparkdl.frameworks.patch import Function, Patch

_log = logging.getLogger(__name__)
_STEPS = "_sparkdl_steps"
"""Of Keras' iterator: how many batches its feeds had given as it began."""


def let_epochs_differ() -> None:
    """Have Keras 3 and tf_keras, where imported, follow their feeds. Again it changes nothing."""
    for library in _LIBRARIES:
        if library.name not in sys.modules:
            continue
        patches = library.patches()
        if objections := [text for patch in patches if (text := patch.objection())]:
            _log.warning(
                "fit does not follow its feed: all epochs must have as many rows as the first, "
                "and there must be as many as are fed: %s",
                objections[0],
            )
            continue
        for patch in patches:
            patch.apply()


@dataclass
class _Fit:
    """A `fit` that reads feeds.

    Attributes:
        iterator: Keras', over the training data; known once it has begun.
        batches: that Keras has told callbacks of, in this epoch.
        has_rows: whether the epoch that has ended had any.
        ended: the feed that has ended, and `fit` with it.
    """

    model: Any
    readers: list[FeedReader]
    epochs: int
    iterator: Any = None
    batches: int = 0
    has_rows: bool = True
    ended: FeedReader | None = None


_fitting: ContextVar[_Fit | None] = ContextVar("sparkdl_fitting", default=None)
"""The innermost `fit` of this thread that reads feeds."""


@dataclass(frozen=True)
class _Library:
    """What Keras 3 and tf_keras call the same things.

    Attributes:
        iterator: of the data of `fit`, `evaluate` and `predict`; `begin` its method that begins.
        length: its attribute, how many batches an epoch has.
        dataset_of: its data.
        counts: whether it was told a number of steps, so that several of Keras' epochs may be one.
    """

    name: str
    fit: Callable[[], str]
    iterator: str
    begin: str
    length: str
    dataset_of: Callable[[Any], Any]
    counts: Callable[[Any], bool]
    callbacks: str

    def patches(self) -> tuple[Patch, ...]:
        """Return what is changed."""
        mentions = (self.length,)
        return (
            Patch(self.fit(), ("self", "x"), self._fit, ("stop_training",)),
            Patch(f"{self.iterator}.{self.begin}", ("self",), self._begin),
            Patch(f"{self.iterator}.catch_stop_iteration", ("self",), self._catch, mentions),
            Patch(f"{self.callbacks}.on_epoch_end", ("self", "epoch", "logs"), self._epoch_ended),
            Patch(f"{self.callbacks}.on_train_batch_end", ("self", "batch", "logs"), _count),
        )

    def _goes_on(self, iterator: Any) -> bool:
        """Whether Keras goes on with the data's iterator that it has."""
        has_begun = hasattr(iterator, _STEPS)
        # Keras 3 forgets one that is at its end, tf_keras ends `fit` then.
        has_one = getattr(iterator, "_current_iterator", iterator) is not None
        return self.counts(iterator) and has_begun and has_one

    def _fit(self, stock: Function, model: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(stock).bind(model, *args, **kwargs)
        given = bound.arguments
        readers = readers_of(given.get("x"))
        state = _Fit(model, readers, given.get("epochs", 1))
        if any(reader.is_resumed and not reader.has_epoch() for reader in readers):
            # The run before this one has trained with all of it.
            given["initial_epoch"] = given.get("epochs", 1)
            _log.warning("fit has nothing left to train on")
        token = _fitting.set(state if readers else None)
        try:
            history = stock(*bound.args, **bound.kwargs)
        finally:
            _fitting.reset(token)
        if model.stop_training:
            for reader in dict.fromkeys([*readers, *readers_of(given.get("validation_data"))]):
                if reader is not state.ended:
                    _log.warning("fit has stopped early, and so feed %r ends", reader.feed)
                    reader.terminate()
        return history

    def _begin(self, stock: Function, iterator: Any) -> Any:
        """Begin to iterate: over an epoch, unless Keras goes on in one."""
        readers = readers_of(self.dataset_of(iterator))
        fit = _fitting.get()
        if fit and fit.iterator is None and readers == fit.readers:
            fit.iterator = iterator
        if not self._goes_on(iterator):
            for reader in readers:
                if not reader.has_epoch():
                    raise reader.end_of_feed()
        setattr(iterator, _STEPS, _steps(readers))
        return stock(iterator)

    @contextmanager
    def _catch(self, stock: Function, iterator: Any) -> Iterator[None]:
        """Note the end of an iteration."""
        before, has_ended = getattr(iterator, self.length), False
        with stock(iterator):
            try:
                yield
            except Exception:
                has_ended = True
                raise
        readers = readers_of(self.dataset_of(iterator))
        if not readers:
            return
        if before is None:
            setattr(iterator, self.length, None)
        fit = _fitting.get()
        has_rows = not has_ended or _steps(readers) != getattr(iterator, _STEPS)
        if fit and fit.iterator is iterator:
            fit.has_rows = has_rows or fit.batches > 0
        elif not has_rows and not self.counts(iterator):
            names = ", ".join(repr(reader.feed) for reader in readers)
            raise ConfigError(
                f"this epoch of feed {names} has no rows, so there is nothing to evaluate or "
                "predict. Feed rows for each epoch in which it is read"
            )

    def _epoch_ended(self, stock: Function, callbacks: Any, epoch: int, logs: Any = None) -> None:
        """Tell the callbacks of an epoch that had rows; end `fit` where there is no further one."""
        fit = _fitting.get()
        if fit is None or fit.iterator is None:
            stock(callbacks, epoch, logs)
            return
        if fit.has_rows or fit.model.stop_training:
            stock(callbacks, epoch, logs)
        else:
            _log.warning("epoch %d of fit had no rows; callbacks are not told of it", epoch + 1)
        fit.batches = 0
        setattr(fit.iterator, _STEPS, _steps(fit.readers))  # tf_keras begins once for all epochs
        if fit.model.stop_training or epoch + 1 >= fit.epochs or self._goes_on(fit.iterator):
            return
        fit.ended = next((reader for reader in fit.readers if not reader.has_epoch()), None)
        if fit.ended is not None:
            fit.model.stop_training = True
            _log.warning(
                "Your input ran out of data; interrupting training: feed %r has ended, and fit was "
                "to go on to epoch %d of %d. Let epochs=… of the feeding and of fit say the same",
                fit.ended.feed,
                epoch + 2,
                fit.epochs,
            )


def _count(stock: Function, callbacks: Any, batch: int, logs: Any = None) -> None:
    if fit := _fitting.get():
        fit.batches += 1
    stock(callbacks, batch, logs)


def _steps(readers: list[FeedReader]) -> list[int]:
    return [reader.steps for reader in readers]


def _fit_of_keras() -> str:
    names = {"tensorflow": "TensorFlowTrainer", "jax": "JAXTrainer", "torch": "TorchTrainer"}
    backend = import_module("keras").backend.backend()
    return f"keras.src.backend.{backend}.trainer:{names.get(backend, 'Trainer')}.fit"


_LIBRARIES = (
    _Library(
        "keras",
        _fit_of_keras,
        "keras.src.trainers.epoch_iterator:EpochIterator",
        "__iter__",
        "_num_batches",
        lambda iterator: getattr(iterator.data_adapter, "_dataset", None),
        lambda iterator: bool(iterator.steps_per_epoch),
        "keras.src.callbacks.callback_list:CallbackList",
    ),
    _Library(
        "tf_keras",
        lambda: "tf_keras.src.engine.training:Model.fit",
        "tf_keras.src.engine.data_adapter:DataHandler",
        "enumerate_epochs",
        "_inferred_steps",
        lambda handler: handler._adapter.get_dataset(),
        lambda handler: not handler._adapter.should_recreate_iterator(),
        "tf_keras.src.callbacks:CallbackList",
    ),
)
