"""Finds the name that a misspelt one was meant to be.

Runs in: anywhere
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the known name nearest to `name`; "" if none is near."""
    by_letters = {_letters(each): each for each in known}
    near = get_close_matches(_letters(name), by_letters, n=1, cutoff=0.7)
    return f"; did you mean {by_letters[near[0]]!r}?" if near else ""


def _letters(name: str) -> str:
    return name.replace("_", "").lower()
