"""Parts of messages: short lists, links to the documentation, near names of misspelt ones."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from difflib import get_close_matches
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


def docs_page(name: str, section: str = "") -> str:
    """Return the link to a page of docs/: its path in the repository, or its address on a site.

    The site is the one that `make docs` builds. SPARKDL_DOCS_URL is the address of its home page,
    which may hold a version: https://docs.example.org/sparkdl/0.1.
    """
    site = os.environ.get("SPARKDL_DOCS_URL", "").rstrip("/")
    page = f"{site}/docs/{name}.html" if site else f"docs/{name}.md"
    return f"{page}#{section}" if section else page


def did_you_mean(name: str, known: Iterable[str], likeness: float = 0.7) -> str:
    """Return "; did you mean 'x'?" for the known name nearest to `name`; "" if none is near."""
    by_letters = {_letters(each): each for each in known}
    near = get_close_matches(_letters(name), by_letters, n=1, cutoff=likeness)
    return f"; did you mean {by_letters[near[0]]!r}?" if near else ""


def _letters(name: str) -> str:
    return name.replace("_", "").lower()
