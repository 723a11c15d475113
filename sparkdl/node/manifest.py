"""What makes a folder a checkpoint: its name, and the manifest in it.

Runs in: driver, child. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from sparkdl.core.errors import CheckpointError
from sparkdl.feed.coverage import FeedCoverage

FORMAT = 1
"""Of the manifest. A reader refuses what is newer than itself."""
MANIFEST = "manifest.json"
_NAME = re.compile(r"(?P<dot>\.?)step-(?P<step>\d{10,})-(?P<cluster>[A-Za-z0-9_]+)-(?P<round>\d+)")


@dataclass(frozen=True, order=True)
class CheckpointName:
    """The name of a checkpoint's folder, unique among all that write into the same folder.

    Attributes:
        generation: of the world that makes it.
    """

    step: int
    cluster_id: str
    generation: int

    def __str__(self) -> str:
        return f"step-{self.step:010d}-{self.cluster_id}-{self.generation}"

    @property
    def unfinished(self) -> str:
        """The name while it is being written, where folders can be renamed."""
        return f".{self}"

    @classmethod
    def parse(cls, text: str) -> tuple[CheckpointName, bool] | None:
        """Return the name, and whether it is that of an unfinished one; `None` for others."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        name = cls(int(match["step"]), match["cluster"], int(match["round"]))
        return name, bool(match["dot"])


class Manifest(msgspec.Struct, frozen=True):
    """The contents of `manifest.json`, which is written last.

    Args:
        format: of this file.
        step: the user's count.
        generation: of the world that made it.
        time_s: when it was made, seconds since the epoch.
        nodes: names of the nodes that have written into it.
        feeds: the rows that made its state, by feed.
        files: bytes of each file, by its path in the folder, with slashes.
    """

    step: int
    cluster_id: str
    generation: int
    time_s: float
    nodes: tuple[str, ...]
    feeds: dict[str, FeedCoverage]
    files: dict[str, int] = {}
    format: int = FORMAT


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def decode_manifest(data: bytes, where: str) -> Manifest | None:
    """Read a manifest; `None` if it is broken.

    Raises:
        CheckpointError: if a newer sparkdl has written it.
    """
    try:
        header = msgspec.json.decode(data)
        if isinstance(header, dict) and header.get("format", 0) > FORMAT:
            raise CheckpointError(
                f"{where} was made by a newer sparkdl (format {header['format']}, this one knows "
                f"{FORMAT}); install that, or choose another checkpoint_dir"
            )
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, TypeError):
        return None
