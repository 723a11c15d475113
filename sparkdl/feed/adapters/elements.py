"""What an element of a dataset is: `(x, y)`, `x` alone, or all columns.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkdl.feed.reader.batches import SAMPLE_WEIGHT

Names = str | Sequence[str]


def arrange(columns: dict[str, Any], x: Names | None, y: Names | None) -> Any:
    """Return `(x, y)`; `x` alone without `y`; all columns without both.

    Weights that neither names are another element at the end. Several names make a dict.
    """
    if x is None:
        return columns
    named = [names for names in (x, y) if names is not None]
    if SAMPLE_WEIGHT in columns and not any(SAMPLE_WEIGHT in _listed(names) for names in named):
        named.append(SAMPLE_WEIGHT)
    parts = [
        columns[names] if isinstance(names, str) else {name: columns[name] for name in names}
        for names in named
    ]
    return parts[0] if len(parts) == 1 else tuple(parts)


def _listed(names: Names) -> Sequence[str]:
    return [names] if isinstance(names, str) else names
