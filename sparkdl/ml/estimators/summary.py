"""What came of a training: history, rows, time.

Runs in: driver
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import Any

import msgspec

from sparkdl.control.values import decode_value, encode_value
from sparkdl.driver.feeds.report import FeedReport


@dataclass(frozen=True)
class TrainingSummary:
    """What came of a `fit`.

    Attributes:
        history: metric to its values, one for each epoch, as the chief returned them.
        feed: what became of the training rows.
        seconds: from the launch of the nodes to their end.
        results: what `train_fn` returned on each node, by rank.
    """

    history: dict[str, list[float]] = field(default_factory=dict)
    feed: FeedReport = field(default_factory=FeedReport)
    seconds: float = 0.0
    results: tuple[Any, ...] = ()

    def saved(self) -> dict[str, Any]:
        """Return the summary as JSON can hold it."""
        told = asdict(replace(self, results=()))
        return {**told, "results": [b64encode(encode_value(r)).decode() for r in self.results]}

    @classmethod
    def loaded(cls, saved: Mapping[str, Any]) -> TrainingSummary:
        """Return what `saved` was of."""
        results = tuple(decode_value(b64decode(result)) for result in saved["results"])
        return replace(msgspec.convert({**saved, "results": ()}, cls), results=results)

    @property
    def total_epochs(self) -> int:
        """How many epochs the history tells of."""
        return max(map(len, self.history.values()), default=0)


def history_of(result: Any) -> dict[str, list[float]]:
    """Return the history in what `train_fn` returned: itself, or its entry `history`.

    It is a dict from names to lists of numbers, like `History.history` of Keras; anything else is
    no history, and gives an empty one.
    """
    if isinstance(result, Mapping) and isinstance(result.get("history"), Mapping):
        result = result["history"]
    if not isinstance(result, Mapping):
        return {}
    return {
        str(name): [float(value) for value in values]
        for name, values in result.items()
        if isinstance(values, (list, tuple)) and all(isinstance(v, Real) for v in values)
    }
