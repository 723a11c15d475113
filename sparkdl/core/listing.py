"""Lists in messages, shortened, because a cluster may have thousands of nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

MOST = 10
"""Up to so many are all listed."""
_FIRST = 5


def listed(texts: Collection[str], separator: str = ", ") -> str:
    """Return the texts in a row; of many the first ones, and how many more there are."""
    if len(texts) <= MOST:
        return separator.join(texts)
    return f"{separator.join(islice(texts, _FIRST))} and {len(texts) - _FIRST} more"


def count(number: int, what: str) -> str:
    """Return `1 node`, `2 nodes`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def ports_in_words(ports: Sequence[int]) -> str:
    first, last = ports[0], ports[-1]
    if first == last:
        return f"port {first}" if first else "any free port"
    return f"ports {first}-{last}"
