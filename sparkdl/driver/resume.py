"""Where a job goes on: the newest checkpoint in its `checkpoint_dir`.

Runs in: driver
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from sparkdl.core.errors import ConfigError
from sparkdl.core.paths import absolute_url
from sparkdl.core.spec import ClusterSpec

if TYPE_CHECKING:
    from sparkdl.node.checkpoint_store import Found

_log = logging.getLogger(__name__)


def at_newest_checkpoint(spec: ClusterSpec) -> tuple[ClusterSpec, Found | None]:
    """Make the folder of the checkpoints absolute, and return the newest one in it.

    Raises:
        ConfigError: if it cannot be written.
        CheckpointError: if it cannot be read.
    """
    if spec.checkpoint_dir is None:
        return spec, None
    if not spec.checkpoint_dir:
        raise ConfigError("checkpoint_dir='': give a path or a URL, or None for no checkpoints")
    from sparkdl.node.checkpoint_store import open_store

    url = absolute_url(spec.checkpoint_dir, spec.default_fs, spec.working_dir)
    store = open_store(url)
    store.check_writable()
    found = store.newest()
    if found is not None:
        _log.info("Cluster %s goes on at checkpoint %s", spec.cluster_id, found.ref.url)
    return replace(spec, checkpoint_dir=url), found
