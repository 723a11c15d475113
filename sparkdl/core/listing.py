"""Lists in messages: there may be thousands of nodes, and a person reads what is said.

Runs in: anywhere
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

MOST = 10
"""So many are all listed."""
_FIRST = 5


def listed(texts: Collection[str], separator: str = ", ", most: int = MOST) -> str:
    """Return the texts in a row; of many the first ones, and how many more there are."""
    if len(texts) <= most:
        return separator.join(texts)
    return f"{separator.join(islice(texts, _FIRST))} and {len(texts) - _FIRST} more"
