"""A node's file on its way to the driver: whole over a bad network, or a typed error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkdl.core.errors import ResultError
from sparkdl.feed.transfer.files import PIECE_NBYTES, SentFile, digest_of
from sparkdl.feed.transfer.messages import FeedSpec
from sparkdl.feed.transfer.server import FlightServer
from sparkdl.ml.model_file import fetch_file
from tests.doubles.feeds import TOKEN
from tests.doubles.proxy import Proxy

NBYTES = 2 * PIECE_NBYTES + 1000
SPEC = FeedSpec("", 0, "", (), TOKEN)


@pytest.fixture
def uri(tmp_path: Path) -> Iterator[str]:
    store: Any = None
    server = FlightServer("127.0.0.1", TOKEN, store, folder=tmp_path)
    yield str(server.uri)
    server.shutdown()


@pytest.fixture
def sent(tmp_path: Path) -> SentFile:
    path = tmp_path / "fit_1.pt"
    path.write_bytes(bytes(range(256)) * (NBYTES // 256) + bytes(NBYTES % 256))
    return SentFile(path.name, NBYTES, digest_of(path))


def test_file_comes_whole_although_the_network_breaks_in_the_middle(
    uri: str, sent: SentFile, tmp_path: Path
) -> None:
    with Proxy(uri, break_at=700) as proxy:
        fetch_file(SPEC, proxy.uri, sent, tmp_path / "target")
        assert proxy.has_broken
    assert (tmp_path / "target").read_bytes() == (tmp_path / sent.name).read_bytes()


def test_cut_changed_gone_or_moved_is_an_error(uri: str, sent: SentFile, tmp_path: Path) -> None:
    def fails(match: str, name: str = sent.name, uri: str = uri) -> None:
        wanted = SentFile(name, sent.nbytes, sent.sha256)
        with pytest.raises(ResultError, match=match):
            fetch_file(SPEC, uri, wanted, tmp_path / "target", patience_s=0.2)

    with (tmp_path / sent.name).open("rb+", buffering=0) as file:
        file.write(b"other")
        fails(f"{NBYTES} of {NBYTES} bytes .*checksum is not that of the node's.*set model_dir")
        file.truncate(PIECE_NBYTES)
        fails(f"fit_1.pt did not .*: {PIECE_NBYTES} of {NBYTES} bytes came .*the file ends there")
    fails("cannot be read: .*No such file", "gone")
    fails("not a .*FilePiece", f"../{tmp_path.name}/{sent.name}")
    with Proxy(uri) as proxy:
        proxy.cut()
        fails(f": 0 of {NBYTES} bytes came from {proxy.uri}: ", uri=proxy.uri)
