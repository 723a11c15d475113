"""The codes by which an error is recognised once Spark or Arrow Flight has made text of it.

Neither carries an exception from one process to another: what arrives is its text, among text of
their own. A code in brackets survives that, so the sentences around it can be reworded.
"""

from __future__ import annotations

import json
import re
from enum import Enum


class Code(Enum):
    """Marks in an error's text by which programs recognise its cause."""

    CLUSTER_FAILED = "SPARKDL-CLUSTER-FAILED"
    """No node answers any more, because the cluster has failed for good."""
    FEED_LOST = "SPARKDL-FEED-LOST"
    """A feeder has lost the connection to a node."""
    NULL_VALUE = "SPARKDL-NULL-VALUE"
    """A column that refuses nulls holds one. Value: the column's name."""
    RAISED = "SPARKDL-RAISED"
    """A Spark task raised an error for the driver to raise. Values: the error's class, its text."""
    WRONG_ANSWER = "SPARKDL-WRONG-ANSWER"
    """A node answered rows with too few or too many results: another node would do the same."""

    def __str__(self) -> str:
        return self.mark()

    def mark(self, *values: str) -> str:
        # As JSON, so that a value may contain quotes, brackets and line breaks.
        return f"[{' '.join([self.value, *map(json.dumps, values)])}]"

    def is_in(self, error: BaseException | str) -> bool:
        return self.values_in(error) is not None

    def values_in(self, error: BaseException | str) -> tuple[str, ...] | None:
        """Return the values written with this code; `None` if the text does not have it."""
        found = re.search(rf'\[{self.value}((?: "(?:[^"\\]|\\.)*")*)\]', str(error))
        if found is None:
            return None
        return tuple(map(json.loads, re.findall(r'"(?:[^"\\]|\\.)*"', found[1])))
