"""A socket at which other processes of this user and machine query a cluster.

Runs in: driver

`sparkdl runs`, `stacks` and `top` ask there (`driver/runs.py`). It is a Unix socket in a folder of
mode 0700. The kernel thus checks access, no secret is written to a disk, and connecting to a dead
driver's socket fails.

Why not the coordinator's port? A client would need the cluster's token, which also admits agents
and feeders, and its certificate, both in files. The dashboard's process is not always there.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import tempfile
import threading
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import msgspec

from sparkdl.core.deadline import Deadline
from sparkdl.driver.controller import Controller
from sparkdl.driver.events import Ended

_log = logging.getLogger(__name__)

SUFFIX = ".sock"
PRESENT, STACKS = b"present\n", b"stacks\n"
"""The questions. The answers are JSON: `Controller.events.present`, and texts by node."""
STACKS_S = 5.0
_ASK_S = 5.0
_RETRY_S = 1.0
_BACKLOG = 16


def folder_of_user() -> Path:
    """Return the folder of this user's sockets.

    Why not $XDG_RUNTIME_DIR? It is deleted when the user logs out. Why not $HOME? Hosts may share
    it, and a socket there would seem dead on all hosts except one.
    """
    return Path(tempfile.gettempdir(), f".sparkdl-{os.getuid()}")


def is_own(folder: Path) -> bool:
    """Whether only this user can write to a folder, so that its sockets can be trusted."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o77


def answer_runs(controller: Controller) -> None:
    """Answer queries about a cluster until it has ended; if a socket cannot be made, log it."""
    path = folder_of_user() / f"{controller.spec.cluster_id}{SUFFIX}"
    name, is_over = f"sparkdl-runs-{controller.spec.cluster_id}", threading.Event()
    with ExitStack() as begun:
        try:
            listener = begun.enter_context(_listen(path))
            accept = partial(_accept, controller, listener, is_over)
            thread = threading.Thread(target=accept, name=name, daemon=True)
            thread.start()
            begun.pop_all()  # the thread closes it
        except (OSError, RuntimeError) as error:  # RuntimeError: no further thread
            cluster = controller.spec.cluster_id
            _log.info("Cluster %s is not listed by `sparkdl runs`: %s", cluster, error)
            return

    def close(_: Ended) -> None:
        is_over.set()
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # ends the `accept`; elsewhere than on Linux this:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as waker:
            waker.connect(str(path))
        with suppress(OSError):
            path.unlink()
            path.parent.rmdir()  # if it was the last
        thread.join(_ASK_S)

    controller.events.subscribe(close, Ended)


def _listen(path: Path) -> socket.socket:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    # The temporary folder is shared: another user may have made this folder first.
    if not is_own(path.parent):
        raise PermissionError(f"{path.parent} is not this user's alone")
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _accept(controller: Controller, listener: socket.socket, is_over: threading.Event) -> None:
    with listener:
        while not is_over.is_set():
            try:
                asking = listener.accept()[0]
                answer = partial(_answer, controller, asking)
                threading.Thread(target=answer, name="sparkdl-runs-answer", daemon=True).start()
            except (OSError, RuntimeError):
                # Its end; or the driver has no file or thread left, for a while perhaps.
                is_over.wait(_RETRY_S)


def _answer(controller: Controller, asking: socket.socket) -> None:
    with asking:
        asking.settimeout(_ASK_S)
        try:
            asked = asking.recv(64)
            if asked == PRESENT:
                asking.sendall(msgspec.json.encode(controller.events.present()))
            elif asked == STACKS:
                stacks = controller.questions.fetch_stacks(Deadline.after(STACKS_S))
                asking.sendall(msgspec.json.encode(stacks))
        except Exception:  # noqa: BLE001 (whatever it is, the training does not need this)
            _log.debug("A question was not answered", exc_info=True)
