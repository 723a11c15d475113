"""Where a node's children come from: forked by the executor's zygote, or started cold.

Runs in: agent
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from sparkdl.control.channel import ChildPipe, Local
from sparkdl.core.settings import Environment, Settings
from sparkdl.node.forking import Place, Request
from sparkdl.node.supervisor import Child, ChildSpec

_log = logging.getLogger(__name__)

OnMessage = Callable[[Local, int], None]
OnExit = Callable[[int], None]


class Children:
    """Starts a node's children. Runs on the loop; its owner calls `close`.

    Args:
        place: where the zygote is, or is started; `None` if there can be none.
        say: takes a line for the node's log.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        spec: ChildSpec,
        settings: Settings,
        place: Place | None,
        say: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._spec = spec
        self._keep_s = settings.keep_warm_s
        is_useful = settings.max_restarts > 0 or settings.keep_warm_s > 0
        # YARN counts pages that processes share for each of them, and ends a container by the sum.
        self._place = place if is_useful and not Environment.read().is_yarn else None
        self._say = say
        self._held: socket.socket | None = None

    def start(self, on_message: OnMessage, on_exit: OnExit) -> tuple[Child, ChildPipe]:
        """Return a new child, which is the caller's."""
        place = self._place if self._hold() else None
        if place is None:
            child = Child.spawn(self._spec)
            child.watch(self._loop, on_exit)
        else:
            child = Child.fork(self._loop, self._spec, place, on_exit, self._say)
        return child, ChildPipe(self._loop, child.sock, on_message)

    def close(self) -> None:
        """Let the zygote know that this agent needs no child any more."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def _hold(self) -> bool:
        """Have a zygote stay for this agent; return whether there is one."""
        if not self._is_held() and self._place is not None:
            self.close()
            try:
                self._held = self._place.connect(Request("hold", self._keep_s))
                self._held.setblocking(False)
            except OSError as error:
                _log.warning("No zygote, so the child imports by itself: %s", error)
        return self._held is not None

    def _is_held(self) -> bool:
        """Whether the zygote that was asked to stay is there; it sends nothing."""
        try:
            return self._held is not None and bool(self._held.recv(1))
        except BlockingIOError:
            return True
        except OSError:
            return False
