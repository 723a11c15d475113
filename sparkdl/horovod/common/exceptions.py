"""Horovod's errors, by its names.

Runs in: anywhere
"""

from __future__ import annotations

from sparkdl.core.errors import CollectiveError, ConfigError, SparkdlError


class NotInitializedError(ConfigError):
    """`hvd.init()` has not been called, or `hvd.shutdown()` has."""


HorovodInternalError = CollectiveError
"""A collective failed; Horovod's name. Inside `hvd.elastic.run` it leads to a restart."""


class HostsUpdatedInterrupt(SparkdlError, RuntimeError):  # noqa: N818 (Horovod's name)
    """Workers came or went. Never raised here: the world changes between rounds, by a restart.

    Attributes:
        skip_sync: whether the state need not be synchronized.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        self.skip_sync = skip_sync
        super().__init__("the hosts of this training have changed")


class OrderOfCallsError(ConfigError, AssertionError):
    """An optimizer's methods were called in an order that loses gradients."""
