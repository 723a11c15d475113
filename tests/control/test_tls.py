"""Who shows which certificate, what is refused before anything starts, and the control plane."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import ssl
import stat
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparkdl.control import tls as tls_module
from sparkdl.control.cause import fetch_cause
from sparkdl.control.client import CoordinatorClient
from sparkdl.control.host_watch import HostWatch
from sparkdl.control.messages import NewRound, Offer
from sparkdl.control.server import Timeouts
from sparkdl.control.tls import Tls, Trust, choose_tls, new_tls, read_tls
from sparkdl.core.errors import ConfigError, LaunchError
from sparkdl.core.options import TlsFiles
from sparkdl.driver.executors.executor import Launch
from sparkdl.node.spec import AgentSpec
from tests.control.rooms import LOOPBACK, SOON_S, TOKEN, hello, on_loop, room
from tests.doubles.certificates import NAME, Company
from tests.node.test_spec import PLAIN

SETTING = "spark.network.crypto.enabled"


@pytest.fixture
def company(tmp_path: Path) -> Company:
    return Company(tmp_path / "company")


@pytest.fixture(scope="module")
def ours() -> Tls:
    return new_tls()


# what is chosen


def test_without_a_word_it_is_on_where_spark_encrypts_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "sparkdl"):
        assert choose_tls(None, "") is None
        assert choose_tls(False, SETTING) is None
        assert not caplog.messages
        assert choose_tls(None, SETTING) is not None
        assert choose_tls(True, "") is not None
    (line,) = caplog.messages
    assert line == f"TLS is on, because {SETTING} is; Startup(tls=False) leaves it off"


def test_missing_package_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    install = r"pip install cryptography\..*tls=False"
    with pytest.raises(ConfigError, match=f"^tls=True is on.*{install}"):
        choose_tls(True, "")
    with pytest.raises(ConfigError, match=f"^{SETTING} is on.*{install}"):
        choose_tls(None, SETTING)


def test_files_of_ones_own_need_no_package(
    company: Company, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = company.issue("driver", NAME)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert choose_tls(files, "") is not None


# what is secret


def test_key_is_in_no_repr_and_in_no_file(
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
    order = replace_tls(PLAIN, ours)
    launch = Launch("wss://h:1", TOKEN, PLAIN.spec, b"", tls=ours)
    secret = ours.key.decode().splitlines()[1]
    for holder in (ours, order, launch, {"tls": ours}):
        assert "PRIVATE" not in repr(holder)
        assert secret not in repr(holder)
    assert msgspec.json.decode(msgspec.json.encode(order), type=AgentSpec) == order


def replace_tls(order: AgentSpec, tls: Tls) -> AgentSpec:
    return msgspec.structs.replace(order, tls=tls)


def test_key_of_a_company_does_not_travel_and_that_of_this_host_is_read(company: Company) -> None:
    here = read_tls(company.issue("driver", NAME, "driver.example", folder="host"))
    sent = here.to_send()
    assert (sent.cert, sent.key) == (b"", b"")
    assert b"PRIVATE" not in pickle.dumps(sent)
    company.issue("executor", "executor.example", NAME, folder="host")  # the same paths
    there = sent.on_this_host()
    assert there.key not in (b"", here.key)
    assert there.trust == here.trust == Trust(Path(company.ca).read_bytes(), NAME)


# what is refused before anything starts


def test_certificates_that_cannot_be_used_are_an_error_that_says_why(company: Company) -> None:
    good, other = company.issue("driver", NAME), company.issue("other", NAME)
    stranger = Company(company.folder / "stranger")
    junk = str(company.folder / "junk.pem")
    Path(junk).write_bytes(b"\xffno certificate")
    bad: dict[str, TlsFiles] = {
        "cert cannot be read.*No such file.*driver and at all executors": good._replace(cert="no"),
        "key cannot be read.*No such file": good._replace(key="no"),
        "ca cannot be read.*No such file": good._replace(ca="no"),
        r"(?i)key.values.mismatch": good._replace(key=other.key),
        "certificate has expired": company.issue("old", NAME, days=-1),
        "certificate signature failure": good._replace(ca=stranger.ca),
        "carries no DNS name": company.issue("nameless"),
        "Hostname mismatch": good._replace(name="another.example"),
        "have no passphrase": company.issue("locked", NAME, passphrase=b"secret"),
        "cannot be used": good._replace(cert=junk),
        "cannot be used:": good._replace(ca=junk),
    }
    for reason, files in bad.items():
        with pytest.raises(ConfigError, match=reason) as refused:
            choose_tls(files, "")
        assert "PRIVATE" not in str(refused.value)
    assert read_tls(good).trust.name == NAME


def test_host_whose_certificate_lacks_the_clusters_name_is_refused(company: Company) -> None:
    sent = read_tls(company.issue("driver", NAME, folder="host")).to_send()
    company.issue("executor", "executor.example", folder="host")
    with pytest.raises(ConfigError, match="Hostname mismatch"):
        sent.on_this_host()
    company.issue("executor", "*.company.example", folder="host")
    assert sent.on_this_host().key


def test_certificate_for_all_names_of_a_domain_will_do(company: Company) -> None:
    tls = read_tls(company.issue("driver", "*.company.example"))
    assert tls.trust.name == "sparkdl.company.example"


# the control plane


@pytest.mark.parametrize("kind", ["ours", "company"])
@on_loop
async def test_client_and_server_understand_each_other_over_tls(
    kind: str, ours: Tls, company: Company
) -> None:
    tls = ours if kind == "ours" else read_tls(company.issue("driver", NAME))
    async with room(tls=tls) as here:
        assert here.address.url.startswith("wss://")
        client = await CoordinatorClient.connect(here.address.url, TOKEN, SOON_S, trust=tls.trust)
        client.send(hello("a"))
        client.send(Offer(0, 1))
        assert await here.heard.next() == ("joined", "a")
        assert await here.heard.next() == ("said", "a", Offer(0, 1))
        here.server.send("a", NewRound(1))
        assert await asyncio.wait_for(anext(client.messages()), SOON_S) == NewRound(1)
        sock = client._connection.transport.get_extra_info("socket")
        watch = HostWatch(sock, SOON_S)
        if sys.platform == "linux":
            assert watch._info() is not None, "the kernel tells of the connection below TLS"
        assert watch.look() == "there"
        await client.close()
        assert (await here.heard.next())[:2] == ("left", "a")


@on_loop
async def test_wrong_root_wrong_name_and_no_tls_are_refused_in_a_line(
    ours: Tls, company: Company, caplog: pytest.LogCaptureFixture
) -> None:
    signed = read_tls(company.issue("driver", NAME))

    async def refused(url: str, trust: Trust | None, what: str) -> None:
        with pytest.raises(LaunchError, match=what):
            await CoordinatorClient.connect(url, TOKEN, SOON_S, trust=trust)

    caplog.set_level(logging.INFO, "sparkdl")
    async with room(tls=signed) as here:
        url = here.address.url
        wrong = replace(signed.trust, name="another.example")
        await refused(url, ours.trust, "is not this cluster's coordinator.*VERIFY_FAILED")
        await refused(url, wrong, "is not this cluster's coordinator.*mismatch")
        await refused(url.replace("wss", "ws"), None, "cannot be reached")
        assert here.heard.queue.empty()
    async with room() as plain:
        url = plain.address.url.replace("ws", "wss")
        await refused(url, ours.trust, "coordinator")
    (line,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert line.name == tls_module.__name__
    assert "its peer speaks no TLS" in line.getMessage()
    assert line.exc_info is None


@on_loop
async def test_peers_that_do_not_shake_hands_are_dropped_and_do_not_hold_up_the_stop(
    ours: Tls,
) -> None:
    async with room(timeouts=Timeouts(hello_s=0.05), tls=ours) as here, here.raw() as (reader, _):
        assert await asyncio.wait_for(reader.read(), SOON_S) == b""  # hung up on
    async with room(tls=ours) as here, AsyncExitStack() as stack:
        for begun in (b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"):
            await stack.enter_async_context(here.raw(begun))
        client = await CoordinatorClient.connect(here.address.url, TOKEN, SOON_S, trust=ours.trust)
        await asyncio.wait_for(here.server.stop(), SOON_S / 4)
        await client.close()


@on_loop
async def test_mute_server_is_given_up(ours: Tls) -> None:
    with socket.create_server((LOOPBACK, 0)) as mute:
        url = f"wss://{LOOPBACK}:{mute.getsockname()[1]}"
        with pytest.raises(LaunchError, match=r"cannot be reached.*Timeout"):
            await CoordinatorClient.connect(url, TOKEN, 0.05, trust=ours.trust)
        with pytest.raises(TimeoutError):
            fetch_cause(url, TOKEN, ours.trust, timeout_s=0.05)


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
