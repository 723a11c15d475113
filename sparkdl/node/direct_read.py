"""Files that a node reads without the driver: the child says which, its agent reads.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparkdl.control.channel import ReadParquet
from sparkdl.control.rows import EpochRows
from sparkdl.core.errors import ConfigError
from sparkdl.core.world import Member, World
from sparkdl.feed.parquet.paths import ParquetPaths, Paths, parquet
from sparkdl.node.link import AgentLink


def wanted_files(
    path: Paths | ParquetPaths,
    columns: Sequence[str] | None,
    options: Mapping[str, Any] | None,
    epochs: int | None,
    absolute: Callable[[str], str],
) -> ParquetPaths:
    """Return the files that user code asks for.

    Args:
        columns, options: instead of those that `path` has, if it has any.
        absolute: says where a path without a scheme is.

    Raises:
        ConfigError: if an argument cannot be.
    """
    if epochs is not None and epochs < 1:
        raise ConfigError(f"epochs={epochs} must be at least 1, or None")
    if isinstance(path, ParquetPaths):
        columns = path.columns if columns is None else columns
        options = path.options if options is None else options
        path = path.paths
    asked = parquet(path, columns, options)
    return replace(asked, paths=tuple(map(absolute, asked.paths)))


def read_own(
    link: AgentLink,
    feed: str,
    world: World,
    member: Member,
    files: ParquetPaths,
    epochs: int | None,
    seed: int | None,
    done: EpochRows,
) -> None:
    """Have the agent read `member`'s share of `files` into `feed`: all rows if it does not train.

    Args:
        epochs: how many; `None` for as many as are asked for.
        seed: of the order of the row groups; `None` keeps it.
        done: rows, by epoch, that a checkpoint of the nodes that train covers.
    """
    sharers = world.trainers if member.role.is_trainer else (member,)
    nodes = tuple(sharer.node.node_id for sharer in sharers)
    own, options = member.node.node_id, dict(files.options)
    done = done if member.role.is_trainer else {}
    link.send(
        ReadParquet(feed, files.paths, nodes, own, files.columns, options, epochs, seed, done)
    )
