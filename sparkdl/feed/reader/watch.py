"""The reports of feeds' readers about a training: when epochs begin, and when `fit` does.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TrainingWatch:
    """A watch that ignores everything; `frameworks/lone_training.py` has the one that looks."""

    def iterate(self, feed: str) -> None:
        """Note that user code begins to iterate over `feed`."""

    def epoch_over(self, feed: str, goes_on: bool) -> None:
        """Note that an epoch of `feed` is over, or, if it goes on, a micro-batch of a stream."""

    def fit_begins(self, model: Any, feeds: Sequence[str]) -> None:
        """Check a model of Keras that is about to train on these feeds.

        Raises:
            ConfigError: if several nodes train models of their own on them.
        """

    def end(self) -> None:
        """Note that `map_fun` has returned."""


UNWATCHED = TrainingWatch()
