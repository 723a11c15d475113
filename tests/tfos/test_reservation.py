"""The meeting point: who is let in, who is there, who waits how long, where it listens."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import pytest

from sparkdl.core.errors import ConfigError, LaunchError, ReservationTimeoutError
from sparkdl.tfos.reservation import TOKEN_VARIABLE, Client, Server

SOON_S = 10.0

Address = tuple[str, int]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFOS_SERVER_HOST", "127.0.0.1")
    for name in ("SPARKDL_DRIVER_HOST", "SPARKDL_DRIVER_PORT", "TFOS_SERVER_PORT", TOKEN_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[tuple[Server, Address]]:
    it = Server(2)
    yield it, it.start()
    it.stop()


def node(number: int, host: str = "a") -> dict[str, Any]:
    return {"executor_id": number, "host": host, "addr": (host, 5000), "authkey": b"\x00\xff"}


def test_clients_meet_and_learn_of_each_other(server: tuple[Server, Address]) -> None:
    it, address = server
    with closing(Client(address)) as one, closing(Client(address)) as two:
        assert one.register(node(0)) == "OK"
        assert two.get_reservations() == [node(0)]
        with ThreadPoolExecutor(1) as pool:
            there = pool.submit(one.await_reservations, SOON_S)
            assert two.register(node(1)) == "OK"
            assert there.result() == [node(0), node(1)]
        assert it.await_reservations(timeout=SOON_S) == [node(0), node(1)]


def test_waits_end_and_tell_how_many_came(server: tuple[Server, Address]) -> None:
    it, address = server
    with closing(Client(address)) as client:
        client.register(node(0))
        with pytest.raises(ReservationTimeoutError, match=r": 1 nodes came within 0\.1 s"):
            client.await_reservations(0.1)
    with pytest.raises(ReservationTimeoutError, match=r"timed out waiting.*: 1 nodes"):
        it.await_reservations(timeout=0.1)


def test_client_without_the_token_stays_outside(
    server: tuple[Server, Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "a secret")
    with closing(Client(server[1])) as client:
        with ask_for_the_end(server[1], SPARKDL_RESERVATION_TOKEN="guessed") as other:
            assert other.wait(SOON_S * 6) == 1
        assert not server[0].done
        assert client.register(node(0)) == "OK"
        with ask_for_the_end(server[1]) as other:
            assert other.wait(SOON_S * 6) == 0
    assert server[0].done


def ask_for_the_end(address: Address, **environ: str) -> subprocess.Popen[bytes]:
    """Start a program that asks the server for the end."""
    command = [sys.executable, "-m", "sparkdl.tfos.reservation", address[0], str(address[1])]
    return subprocess.Popen(command, env=os.environ | environ, stderr=subprocess.DEVNULL)


def test_peer_that_sends_half_a_frame_or_pickle_blocks_none(server: tuple[Server, Address]) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.abort, ()

    data = pickle.dumps(Evil())
    with socket.create_connection(server[1]) as half, socket.create_connection(server[1]) as whole:
        half.sendall(struct.pack(">I", 1000) + b"x")
        with suppress(OSError):
            whole.sendall(struct.pack(">I", len(data)) + data)
        with closing(Client(server[1])) as client:
            assert client.register(node(0)) == "OK"


def test_server_beside_a_coordinator_takes_another_port_where_that_has_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("TFOS_SERVER_PORT", str(port))
        with pytest.raises(ConfigError, match=f"port {port}: .*TFOS_SERVER_PORT"):
            Server(1).start()
        it = Server(1)
        address = it.start(beside="127.0.0.1")
        with closing(Client(address)) as client:
            assert client.get_reservations() == []
        it.stop()


def test_server_needs_somebody_to_wait_for_and_stops_twice() -> None:
    with pytest.raises(ConfigError, match="count=0: must be 1 or more nodes"):
        Server(0)
    it = Server(1)
    address = it.start()
    it.stop()
    it.stop()
    assert it.done
    with pytest.raises(LaunchError, match="did not answer"):
        Client(address)
