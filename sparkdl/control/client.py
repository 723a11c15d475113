"""An agent's connection to the coordinator.

Runs in: agent
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TypeAlias

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from sparkdl.control.auth import bearer
from sparkdl.control.lease import LOOKS, HostWatch, agent_keep_alive, agent_timeout_s
from sparkdl.control.messages import (
    MAX_MESSAGE_NBYTES,
    FromAgent,
    ToAgent,
    decode_to_agent,
    encode,
)
from sparkdl.control.tls import Trust
from sparkdl.core.errors import LaunchError
from sparkdl.core.options import Recovery

Outbox: TypeAlias = "asyncio.Queue[FromAgent | None]"


class CoordinatorClient:
    def __init__(
        self, connection: ClientConnection, host_timeout_s: float, outbox: Outbox | None = None
    ) -> None:
        self.ended = "the connection to the driver ended"
        self._connection = connection
        self._outbox: Outbox = asyncio.Queue() if outbox is None else outbox
        self._writer = asyncio.ensure_future(self._write())
        self._watch = asyncio.ensure_future(self._watch_host(agent_timeout_s(host_timeout_s)))

    @classmethod
    async def connect(
        cls,
        url: str,
        token: str,
        lease_s: float,
        host_timeout_s: float = Recovery.host_timeout_s,
        trust: Trust | None = None,
        num_nodes: int = 1,
        outbox: Outbox | None = None,
    ) -> CoordinatorClient:
        """Connect with the token.

        Args:
            trust: the certificate the coordinator must present, if its URL is `wss://`.
            num_nodes: of the cluster; with thousands each pings more seldom.
            outbox: the queue to send from; messages already in it are sent first.
        """
        keep = agent_keep_alive(lease_s, num_nodes)
        try:
            connection = await connect(
                url,
                additional_headers={"Authorization": bearer(token)},
                max_size=MAX_MESSAGE_NBYTES,
                compression=None,
                # The variables for proxies are about the internet. The driver is in the agents' own
                # network.
                proxy=None,
                ssl=trust.context() if trust else None,
                server_hostname=trust.name if trust else None,
                open_timeout=lease_s,
                ping_interval=keep.ping_interval,
                ping_timeout=keep.ping_timeout,
                close_timeout=keep.close_timeout,
            )
        # An SSLError is an OSError too, so it must be handled first.
        except ssl.SSLError as error:
            raise LaunchError(
                f"what answers at {url} is not this cluster's coordinator: it does not show the "
                f"cluster's certificate ({error})"
            ) from None
        # Before Python 3.11 `asyncio.TimeoutError` is a class of its own.
        except (OSError, TimeoutError, asyncio.TimeoutError, WebSocketException) as error:
            raise LaunchError(
                f"the coordinator at {url} cannot be reached from this executor: "
                f"{type(error).__name__}: {error}. Set SPARKDL_DRIVER_HOST and SPARKDL_DRIVER_PORT "
                "to an address that executors reach, or run the driver in the cluster"
            ) from None
        return cls(connection, host_timeout_s, outbox)

    def send(self, message: FromAgent) -> None:
        """Queue a message; they leave in order."""
        self._outbox.put_nowait(message)

    async def messages(self) -> AsyncIterator[ToAgent]:
        try:
            async for data in self._connection:
                yield decode_to_agent(data)
        except ConnectionClosed:
            return

    async def close(self) -> None:
        self._outbox.put_nowait(None)
        # The writer ends at this mark, after it has sent the messages in front of it.
        await self._writer
        self._watch.cancel()
        await self._connection.close()

    @classmethod
    async def say(
        cls,
        url: str,
        token: str,
        lease_s: float,
        message: FromAgent,
        trust: Trust | None = None,
    ) -> None:
        """Send one message, and wait until it has been taken."""
        client = await cls.connect(url, token, lease_s, trust=trust)
        client.send(message)
        await client.close()

    async def _watch_host(self, timeout_s: float) -> None:
        """End the connection once the driver's host has been silent for so long."""
        watch = HostWatch(self._connection.transport.get_extra_info("socket"), timeout_s)
        while (verdict := watch.look()) != "silent":
            if verdict == "ask":
                with suppress(ConnectionClosed):
                    await self._connection.ping()
            # Not later than the due moment: the child must have ended before the driver gives the
            # host up.
            await asyncio.sleep(min(timeout_s / LOOKS, watch.due_s))
        self.ended = f"the driver's host does not answer: not for {timeout_s:g} s"
        self._connection.transport.abort()

    async def _write(self) -> None:
        while (message := await self._outbox.get()) is not None:
            try:
                await self._connection.send(encode(message))
            except ConnectionClosed:
                return
