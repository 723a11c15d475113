"""What a checkpoint covers of all feeds, by name.

Runs in: driver. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from sparkdl.driver.calls import CallBook
from sparkdl.feed.coverage import EpochRows, FeedCoverage, merge_epochs


class Books:
    """The books of all feeds.

    Args:
        keeps: see `CallBook`.
    """

    def __init__(self, keeps: bool = True) -> None:
        self._keeps = keeps
        self._books: dict[str, CallBook] = {}
        self._restored: dict[str, FeedCoverage] = {}

    @property
    def by_feed(self) -> dict[str, CallBook]:
        """The books by feed, of feeds that have been fed."""
        return dict(self._books)

    def book(self, feed: str) -> CallBook:
        """Return the book of a feed, which comes into being when it is first named."""
        if feed not in self._books:
            self._books[feed] = CallBook(feed, self._keeps)
            self._books[feed].restore(self._restored.get(feed, FeedCoverage()))
        return self._books[feed]

    def restore(self, coverage: Mapping[str, FeedCoverage]) -> None:
        """Begin with what a checkpoint of an earlier run covers."""
        self._restored = dict(coverage)

    def coverage(
        self, generation: int, parts: Mapping[int, Mapping[str, EpochRows]]
    ) -> dict[str, FeedCoverage]:
        """Return what a checkpoint covers whose parts say this, by feed.

        A feed that nodes read themselves (`ctx.parquet`) counts as one call, whose epochs have the
        same numbers in all generations.

        Args:
            parts: by node id, by feed: rows used in `generation`.
        """
        feeds = {feed for part in parts.values() for feed in part}
        covered = {}
        for feed in sorted({*feeds, *self._books, *self._restored}):
            found = [part[feed] for part in parts.values() if feed in part]
            if feed in self._books:
                covered[feed] = self._books[feed].coverage(generation, found)
            else:
                before = self._restored.get(feed, FeedCoverage())
                rows = merge_epochs([before.rows.get(0, {}), *found])
                covered[feed] = (
                    structs.replace(before, rows={**before.rows, 0: rows}) if found else before
                )
        return covered

    def cover(self, coverage: Mapping[str, FeedCoverage]) -> None:
        """A checkpoint is complete that covers this."""
        for feed, covered in coverage.items():
            if feed in self._books:
                self._books[feed].cover(covered)
            else:
                self._restored[feed] = covered
