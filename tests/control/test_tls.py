"""Who shows which certificate, what is refused before anything starts, and the control plane."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import stat
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparkdl.control.auth import fetch_cause
from sparkdl.control.client import CoordinatorClient
from sparkdl.control.messages import ChildReady, NewRound
from sparkdl.control.tls import Tls, Trust, choose_tls, new_tls
from sparkdl.core.errors import ConfigError, LaunchError
from sparkdl.driver.executors.executor import Launch
from sparkdl.node.spec import AgentSpec
from tests.control.rooms import SOON_S, TOKEN, hello, on_loop, room
from tests.node.test_spec import PLAIN

SETTING = "spark.network.crypto.enabled"


@pytest.fixture(scope="module")
def ours() -> Tls:
    return new_tls()


def test_default_is_on_where_spark_encrypts_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sparkdl"):
        assert choose_tls(None, "") is None
        assert choose_tls(False, SETTING) is None
        assert not caplog.messages
        assert choose_tls(None, SETTING) is not None
        assert choose_tls(True, "") is not None
    (line,) = caplog.messages
    assert line == f"TLS is on, because {SETTING} is; Startup(tls=False) leaves it off"


def test_missing_package_is_an_error_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    install = r"pip install cryptography\..*tls=False"
    with pytest.raises(ConfigError, match=f"^tls=True is on.*{install}"):
        choose_tls(True, "")
    with pytest.raises(ConfigError, match=f"^{SETTING} is on.*{install}"):
        choose_tls(None, SETTING)


def test_key_is_in_no_repr_or_file(
    ours: Tls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    seen: list[tuple[str, int]] = []
    load = ssl.SSLContext.load_cert_chain

    def watched(self: ssl.SSLContext, cert: str, key: str, **options: Any) -> None:
        seen.append((os.readlink(key), stat.S_IMODE(os.stat(key).st_mode)))
        load(self, cert, key, **options)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", watched)
    ours.context()
    assert [path.split(" ")[0] for path, _ in seen] == ["/memfd:sparkdl-tls"]
    assert list(tmp_path.iterdir()) == []
    order = msgspec.structs.replace(PLAIN, tls=ours)
    launch = Launch("wss://h:1", TOKEN, PLAIN.spec, b"", tls=ours)
    secret = ours.key.decode().splitlines()[1]
    for holder in (ours, order, launch, {"tls": ours}):
        assert "PRIVATE" not in repr(holder)
        assert secret not in repr(holder)
    assert msgspec.json.decode(msgspec.json.encode(order), type=AgentSpec) == order


@on_loop
async def test_client_and_server_understand_each_other_over_tls(ours: Tls) -> None:
    async with room(tls=ours) as here:
        assert here.address.url.startswith("wss://")
        client = await CoordinatorClient.connect(here.address.url, TOKEN, SOON_S, trust=ours.trust)
        client.send(hello("a"))
        client.send(ChildReady(0, 1))
        assert await here.heard.next() == ("joined", "a")
        assert await here.heard.next() == ("received", "a", ChildReady(0, 1))
        here.server.send("a", NewRound(1))
        assert await asyncio.wait_for(anext(client.messages()), SOON_S) == NewRound(1)
        await client.close()
        assert (await here.heard.next())[:2] == ("left", "a")


@on_loop
async def test_wrong_root_and_no_tls_are_refused_in_a_line(ours: Tls) -> None:
    other = new_tls()

    async def refused(url: str, trust: Trust | None, what: str) -> None:
        with pytest.raises(LaunchError, match=what):
            await CoordinatorClient.connect(url, TOKEN, SOON_S, trust=trust)

    async with room(tls=other) as here:
        url = here.address.url
        await refused(url, ours.trust, "is not this cluster's coordinator.*VERIFY_FAILED")
        await refused(url.replace("wss", "ws"), None, "cannot be reached")
        assert here.heard.queue.empty()
    async with room() as plain:
        await refused(plain.address.url.replace("ws", "wss"), ours.trust, "coordinator")


@on_loop
async def test_peers_that_do_not_shake_hands_are_dropped_and_hold_up_no_stop(ours: Tls) -> None:
    async with room(hello_s=0.05, tls=ours) as here, here.raw() as (reader, _):
        assert await asyncio.wait_for(reader.read(), SOON_S) == b""  # hung up on
    async with room(tls=ours) as here, AsyncExitStack() as stack:
        for begun in (b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"):
            await stack.enter_async_context(here.raw(begun))
        client = await CoordinatorClient.connect(here.address.url, TOKEN, SOON_S, trust=ours.trust)
        await asyncio.wait_for(here.server.stop(), SOON_S / 4)
        await client.close()


@on_loop
async def test_cause_is_told_over_tls_and_to_nobody_without_the_right_root(ours: Tls) -> None:
    async with room(tls=ours) as here:
        url = here.address.url
        for answer in ("it broke", "", None):
            here.heard.failure = answer
            assert await asyncio.to_thread(fetch_cause, url, TOKEN, ours.trust) == answer
        with pytest.raises(OSError, match="401"):
            await asyncio.to_thread(fetch_cause, url, "wrong", ours.trust)
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.to_thread(fetch_cause, url, TOKEN, new_tls().trust)
        with pytest.raises(OSError, match="does not answer"):
            await asyncio.to_thread(fetch_cause, url, TOKEN, None)
