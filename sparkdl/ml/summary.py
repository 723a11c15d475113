"""The result of a `fit`, which its model holds."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from sparkdl.control.values import decode_value, encode_value
from sparkdl.driver.feeds.report import FeedReport

History = dict[str, list[Any]]
"""Metric to its values, one for each epoch; None for an epoch without one."""


@dataclass(frozen=True)
class TrainingSummary:
    """The result of a `fit`.

    Attributes:
        history: metric to its values, one for each epoch, as the chief returned them; None for an
            epoch without one.
        feed: what became of the training rows.
        seconds: from the launch of the nodes to their end.
        results: what `train_fn` returned on each node, by rank.
    """

    history: History = field(default_factory=dict)
    feed: FeedReport = field(default_factory=FeedReport)
    seconds: float = 0.0
    results: tuple[Any, ...] = ()

    def saved(self) -> dict[str, Any]:
        """Return the summary as JSON can hold it."""
        fields = asdict(replace(self, results=()))
        return {**fields, "results": [b64encode(encode_value(r)).decode() for r in self.results]}

    @classmethod
    def loaded(cls, saved: Mapping[str, Any]) -> TrainingSummary:
        """Return what `saved` was of."""
        results = tuple(decode_value(b64decode(result)) for result in saved["results"])
        return replace(msgspec.convert({**saved, "results": ()}, cls), results=results)

    @property
    def total_epochs(self) -> int:
        """How many epochs the history has."""
        return max(map(len, self.history.values()), default=0)
