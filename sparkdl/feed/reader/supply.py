"""The feeds being fed, and the time after which a reader gives up an unfed one.

Between two calls of `cluster.feed` a node waits as long as it takes. It gives up a feed that has
never been fed: its name may be misspelt, or the driver may never feed.
"""

from __future__ import annotations

import time

from sparkdl.core.errors import ConfigError, EndOfFeedError, SparkdlError, UnfedError
from sparkdl.core.spec import ClusterSpec
from sparkdl.core.world import Member


class Supply:
    """The feeds of one node. Any thread may call."""

    def __init__(self) -> None:
        self._begun: set[str] = set()
        self._moved_s = 0.0
        self._timeout_s: float | None = None
        self._unfed_node: str | None = None
        self._is_first = False
        self._node, self._roles = "this node", ""

    def expect(self, spec: ClusterSpec, member: Member, is_resumed: bool) -> None:
        """Give up unfed feeds from now on.

        Args:
            is_resumed: the world continues an earlier one, whose feeds may be over. The driver
                reports finished feeds only when all feeds end.
        """
        self._unfed_node, self._node = None, member.node.name
        if any(node.role.can_be_fed and not node.role.is_fed for node in spec.nodes):
            self._roles = ". A call feeds one role: the one in role=…, or else all that train"
        if not spec.is_fed:
            self._unfed_node = "a cluster with Feeding(fed=False), as sparkdl.run launches it"
        elif not member.role.can_be_fed:
            self._unfed_node = f"{member.node.name}, for its role takes no rows"
        self._is_first = not is_resumed and member.role.finishes_job
        if not is_resumed and (member.role.finishes_job or member.role.is_server):
            self._timeout_s = spec.settings.feeding.timeout_s

    def begin(self, feed: str) -> None:
        """Note that `feed` is being fed."""
        self._begun.add(feed)

    def move(self) -> None:
        """Note that user code has read something, in any feed."""
        self._moved_s = time.monotonic()

    def impossible(self, feed: str) -> ConfigError | None:
        """Return the error if `feed` can never receive rows, else `None`."""
        if self._unfed_node is None or feed in self._begun:
            return None
        return ConfigError(
            f"feed {feed!r} cannot be read: {self._unfed_node} is not fed. Launch with "
            "Feeding(fed=True) and call cluster.feed, or read files with ctx.parquet"
        )

    def never_fed(self, feed: str) -> UnfedError | None:
        """Return the error of a feed that has ended without a call feeding it; `None` otherwise.

        A world that continues an earlier one cannot know.
        """
        if not self._is_first or feed in self._begun:
            return None
        return UnfedError(
            f"feed {feed!r} was never fed to {self._node}, and the driver has ended the feeds. "
            f"Call cluster.feed(data, feed={feed!r}) before cluster.results(), cluster.shutdown() "
            f"or the end of the `with` block{self._fed(': give both sides the same name')}"
            f"{self._roles}"
        )

    def _fed(self, advice: str) -> str:
        others = ", ".join(repr(other) for other in sorted(self._begun))
        return f"; fed was {others}{advice}" if others else ""

    def left_s(self, feed: str, since_s: float) -> float | None:
        """Return how long to wait for a feed on; `None` for as long as it takes.

        Args:
            since_s: when the wait began.
        """
        if self._timeout_s is None or feed in self._begun:
            return None
        # User code that is busy with another feed is not waiting in vain.
        return max(0.0, max(since_s, self._moved_s) + self._timeout_s - time.monotonic())

    def unfed(self, feed: str) -> SparkdlError:
        """Return the error for a `feed` that received no rows in time."""
        others = ", ".join(repr(other) for other in sorted(self._begun))
        return UnfedError(
            f"nobody has fed {feed!r} to {self._node} within "
            f"Feeding(timeout_s={self._timeout_s:g}); "
            + (
                f"being fed is {others}: give cluster.feed(…, feed=…) and ctx.batches(…, feed=…) "
                "the same name"
                if others
                else "nothing is being fed here: call cluster.feed(…) in the driver, or launch "
                "with a longer Feeding(timeout_s=…)"
            )
            + self._roles
        )


def end_of_feed(feed: str, count: int) -> EndOfFeedError:
    """Return the error that says that there is no further epoch after `count` epochs."""
    epochs = f"after {count} epoch{'s' * (count > 1)}" if count else "before any row came"
    return EndOfFeedError(
        f"feed {feed!r} ended {epochs}, and map_fun goes on to epoch {count + 1}, which has no "
        "batches: each loop over it, each epoch of fit, and each evaluate or predict takes one. "
        "Let epochs=… of the feeding and the loop of map_fun say the same, or loop "
        f"`while ctx.has_epoch({feed!r})`. To validate, feed the validation rows as another feed: "
        "cluster.feed_async(rows, epochs=…, feed='validation') before cluster.feed(…), and read it "
        "with feed='validation'"
    )
