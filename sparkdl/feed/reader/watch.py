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

    def epoch_over(self, goes_on: bool) -> None:
        """Note that an epoch is over; if it goes on, the next one belongs to the same iteration."""

    def fit_begins(self, model: Any, feeds: Sequence[str]) -> None:
        """Check a model of Keras that is about to train on these feeds.

        Raises:
            ConfigError: if several nodes train models of their own on them.
        """

    def end(self) -> None:
        """Note that `map_fun` has returned."""


UNWATCHED = TrainingWatch()
