"""An agent's connection to the coordinator.

Runs in: agent
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import TypeAlias

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from sparkdl.control.auth import bearer
from sparkdl.control.lease import KeepAlive, agent_keep_alive, is_host_silent
from sparkdl.control.messages import MAX_MESSAGE_NBYTES, FromAgent, ToAgent, decode_to_agent, encode
from sparkdl.control.tls import NAME, Trust
from sparkdl.core.errors import LaunchError
from sparkdl.core.options import Recovery

Outbox: TypeAlias = "asyncio.Queue[FromAgent | None]"


class CoordinatorClient:
    def __init__(
        self, connection: ClientConnection, keep: KeepAlive, outbox: Outbox | None = None
    ) -> None:
        self.ended = "the connection to the driver ended"
        self._connection = connection
        self._outbox: Outbox = asyncio.Queue() if outbox is None else outbox
        self._writer = asyncio.ensure_future(self._write())
        self._host_timeout_s = keep.host_timeout
        keep.watch_host(connection.transport.get_extra_info("socket"))

    @classmethod
    async def connect(
        cls,
        url: str,
        token: str,
        lease_s: float,
        host_timeout_s: float = Recovery.host_timeout_s,
        trust: Trust | None = None,
        outbox: Outbox | None = None,
    ) -> CoordinatorClient:
        """Connect with the token.

        Args:
            trust: the certificate the coordinator must present, if its URL is `wss://`.
            outbox: the queue to send from; messages already in it are sent first.
        """
        keep = agent_keep_alive(lease_s, host_timeout_s)
        try:
            connection = await connect(
                url,
                additional_headers={"Authorization": bearer(token)},
                max_size=MAX_MESSAGE_NBYTES,
                compression=None,
                # Variables for proxies are about the internet, not the agents' own network.
                proxy=None,
                ssl=trust.context() if trust else None,
                server_hostname=NAME if trust else None,
                open_timeout=lease_s,
                ping_interval=keep.ping_interval,
                ping_timeout=keep.ping_timeout,
                close_timeout=keep.close_timeout,
            )
        # An SSLError is an OSError too, so it must be handled first.
        except ssl.SSLError as error:
            raise LaunchError(
                f"the server at {url} is not this cluster's coordinator: it does not present the "
                f"cluster's certificate ({error})"
            ) from None
        # Before Python 3.11 `asyncio.TimeoutError` is a class of its own.
        except (OSError, TimeoutError, asyncio.TimeoutError, WebSocketException) as error:
            raise LaunchError(
                f"the coordinator at {url} cannot be reached from this executor: "
                f"{type(error).__name__}: {error}. Set SPARKDL_DRIVER_HOST and SPARKDL_DRIVER_PORT "
                "to an address that executors reach, or run the driver in the cluster"
            ) from None
        return cls(connection, keep, outbox)

    def send(self, message: FromAgent) -> None:
        """Queue a message; they leave in order."""
        self._outbox.put_nowait(message)

    async def messages(self) -> AsyncIterator[ToAgent]:
        try:
            async for data in self._connection:
                yield decode_to_agent(data)
        except ConnectionClosed as closed:
            if is_host_silent(closed):
                silence = f"has not answered for {self._host_timeout_s:g} s"
                self.ended = f"the driver's host {silence}"

    async def close(self) -> None:
        self._outbox.put_nowait(None)
        # The writer ends at this mark, after it has sent the messages in front of it.
        await self._writer
        await self._connection.close()

    @classmethod
    async def say(
        cls, url: str, token: str, lease_s: float, message: FromAgent, trust: Trust | None = None
    ) -> None:
        """Send one message, and wait until it has been taken."""
        client = await cls.connect(url, token, lease_s, trust=trust)
        client.send(message)
        await client.close()

    async def _write(self) -> None:
        while (message := await self._outbox.get()) is not None:
            try:
                await self._connection.send(encode(message))
            except ConnectionClosed:
                return
