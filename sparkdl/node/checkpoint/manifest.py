"""What makes a folder a checkpoint: its name, and the manifest in it.

Runs in: driver, child. Pure.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

import msgspec

from sparkdl.control.rows import FeedCoverage
from sparkdl.core.errors import CheckpointError

FORMAT = 1
"""Of the manifest. A reader refuses what is newer than itself."""
MANIFEST = "manifest.json"
_SUM = re.compile(rb'\{\n "checksum": "([0-9a-f]{8})",')
"""How a manifest begins: the CRC-32 of the JSON object without this key."""
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


class _Format(msgspec.Struct, frozen=True):
    """What all versions of a manifest have."""

    format: int


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON, with its checksum."""
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    return b'{\n "checksum": "%08x",' % zlib.crc32(body) + body[1:]


def decode_manifest(data: bytes, where: str) -> Manifest | None:
    """Read a manifest; `None` if it is broken, in whatever way.

    Raises:
        CheckpointError: if a newer sparkdl has written it.
    """
    begin = _SUM.match(data)
    body = b"{" + data[begin.end() :] if begin else b""
    if not begin or int(begin[1], 16) != zlib.crc32(body):
        return None
    try:
        written = msgspec.json.decode(body, type=_Format).format
        if written > FORMAT:
            raise CheckpointError(
                f"{where} was made by a newer sparkdl (format {written}, this one knows {FORMAT}); "
                "install that, or choose another checkpoint_dir"
            )
        return msgspec.json.decode(body, type=Manifest)
    except msgspec.MsgspecError:
        return None
