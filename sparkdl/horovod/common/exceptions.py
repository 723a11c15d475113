"""Horovod's errors, by its names.

Runs in: anywhere
"""

from __future__ import annotations

from sparkdl.core.errors import CollectiveError, ConfigError


class NotInitializedError(ConfigError):
    """`hvd.init()` has not been called, or `hvd.shutdown()` has."""


HorovodInternalError = CollectiveError
"""A collective failed; Horovod's name. Inside `hvd.elastic.run` it leads to a restart."""


class OrderOfCallsError(ConfigError, AssertionError):
    """An optimizer's methods were called in an order that loses gradients."""
