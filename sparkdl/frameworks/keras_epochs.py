"""Keras takes all epochs for as long as the first one; those of a feed need not be.

Runs in: child

An epoch that goes on after a failure is shorter than those after it, and each `cluster.feed` may
bring more rows than the one before. Keras, which does not know the length of a stream, would stop
each later epoch where the first one ended, and leave rows unused.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sparkdl.feed.dataset import readers_of
from sparkdl.frameworks.patch import Function, Patch

_log = logging.getLogger(__name__)


def let_epochs_differ() -> None:
    """Have Keras 3 and tf_keras, where imported, read each epoch of a feed to its end."""
    for library, patch in _PATCHES.items():
        if library not in sys.modules:
            continue
        if objection := patch.objection():
            _log.warning("all epochs of a feed must have as many rows as the first: %s", objection)
        else:
            patch.apply()


@contextmanager
def _catch(
    length: str, dataset_of: Callable[[Any], Any], stock: Function, iterator: Any
) -> Iterator[None]:
    before = getattr(iterator, length)
    with stock(iterator):
        yield
    if before is None and readers_of(dataset_of(iterator)):
        setattr(iterator, length, None)


def _of_keras(iterator: Any) -> Any:
    return getattr(iterator.data_adapter, "_dataset", None)


def _of_tf_keras(handler: Any) -> Any:
    return handler._adapter.get_dataset()


_PATCHES = {
    "keras": Patch(
        "keras.src.trainers.epoch_iterator:EpochIterator.catch_stop_iteration",
        ("self",),
        functools.partial(_catch, "_num_batches", _of_keras),
        ("_num_batches", "data_adapter"),
    ),
    "tf_keras": Patch(
        "tf_keras.src.engine.data_adapter:DataHandler.catch_stop_iteration",
        ("self",),
        functools.partial(_catch, "_inferred_steps", _of_tf_keras),
        ("_inferred_steps",),
    ),
}
