"""The result of a `fit`, which its model holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sparkdl.driver.feeds.report import FeedReport

History = dict[str, list[Any]]
"""Metric to its values, one for each epoch; None for an epoch without one."""


@dataclass(frozen=True)
class TrainingSummary:
    """The result of a `fit`.

    Attributes:
        history: metric to its values, one for each epoch, as the chief returned them; None for an
            epoch without one.
        feed: the report of the feed of training rows; None with `mode='jobs'`, which has none.
        seconds: from the launch of the nodes to their end.
        results: what `train_fn` returned on each node, by rank; not saved.
    """

    history: History = field(default_factory=dict)
    feed: FeedReport | None = None
    seconds: float = 0.0
    results: tuple[Any, ...] = ()
