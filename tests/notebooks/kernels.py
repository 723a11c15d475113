"""A kernel as a front end has it: runs cells, hears what they show, interrupts them."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop

DEADLINE_S = 120.0


@dataclass(frozen=True)
class Cell:
    """What became of a cell: its reply, and what was shown while it ran."""

    reply: dict[str, Any]
    shown: list[dict[str, Any]]

    @property
    def text(self) -> str:
        """What it printed, on both streams."""
        return "".join(m["content"]["text"] for m in self.shown if m["msg_type"] == "stream")

    @property
    def traceback(self) -> str:
        """The traceback as the user sees it, without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(self.reply.get("traceback", ())))

    @property
    def result(self) -> str:
        """The text of its last expression."""
        (found,) = (m for m in self.shown if m["msg_type"] == "execute_result")
        text: str = found["content"]["data"]["text/plain"]
        return text


class Kernel:
    """A kernel of its own process, of this Python."""

    def __init__(self, folder: Path) -> None:
        environment = os.environ | {"IPYTHONDIR": str(folder), "JUPYTER_PLATFORM_DIRS": "1"}
        self._manager = KernelManager(connection_file=str(folder / "kernel.json"))
        self._manager.start_kernel(env=environment, cwd=str(folder))
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=DEADLINE_S)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        ensure_event_loop().close()  # which the two have used

    @property
    def pid(self) -> int:
        """Its process."""
        provisioner: Any = self._manager.provisioner
        return int(provisioner.pid)

    def begin(self, code: str) -> str:
        """Start a cell; return what names it."""
        cell: str = self._client.execute(code)
        return cell

    def interrupt(self) -> None:
        """Do what the button does."""
        self._manager.interrupt_kernel()

    def end(self, cell: str) -> Cell:
        """Wait for a cell's end."""
        shown = []
        end_s = time.monotonic() + DEADLINE_S
        while True:
            message = self._client.get_iopub_msg(timeout=max(0.0, end_s - time.monotonic()))
            shown.append(message)
            is_its = message["parent_header"].get("msg_id") == cell
            if is_its and message["content"].get("execution_state") == "idle":
                break
        while True:
            reply = self._client.get_shell_msg(timeout=DEADLINE_S)
            if reply["parent_header"].get("msg_id") == cell:
                return Cell(reply["content"], shown)

    def run(self, code: str) -> Cell:
        """Run a cell, which must not fail."""
        cell = self.end(self.begin(code))
        assert cell.reply["status"] == "ok", cell.traceback
        return cell
