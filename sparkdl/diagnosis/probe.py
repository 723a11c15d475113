"""Inspects an executor from a Spark task, and reports to the driver.

Runs in: feeder, driver

This module is pickled by value and uses only the standard library, so that it can also inspect an
executor where sparkdl is missing or outdated. Checks that import sparkdl run in child processes
(`diagnosis/look.py`) with a time limit: a hanging import must not stop this task.

A task connects to the driver, and waits until all tasks have connected or the driver stops waiting.
One task of each executor then inspects it; the others end.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from importlib import metadata, util
from typing import Any

PACKAGES = {
    "pyspark": ("pyspark", "pyspark-client", "pyspark-connect"),
    "pyarrow": ("pyarrow",),
    "numpy": ("numpy",),
    "pandas": ("pandas",),
    "cloudpickle": ("cloudpickle",),
    "msgspec": ("msgspec",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "keras": ("keras",),
    "torch": ("torch",),
    "jax": ("jax",),
}
"""The packages to compare, and the distributions that contain them."""
_FOREIGN_FOLDERS = ("transformers", "graph", "xgboost", "image")
"""Folders of another package named sparkdl: `core/namesakes.py`."""
_CONNECT_S = 5.0
_MARGIN_S = 10.0
_LINE_CHARS = 400


def answer(order: dict[str, Any], batches: Iterable[Any]) -> Iterator[Any]:
    """Run one task, for `DataFrame.mapInArrow`; its row is the facts as JSON, or empty.

    Args:
        order: `host`, `port` and `token` of the driver's desk, whose host is empty if there is
            none; `wait_s`, until all tasks are there; `limit_s`, for each thing to look at;
            `looks`, the arguments of `diagnosis/look.py` by name.
    """
    import pyarrow as pa

    for _ in batches:  # which only carry the partition
        pass
    yield pa.RecordBatch.from_pydict({"facts": [json.dumps(facts_of(order))]})


def facts_of(order: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `Facts`; empty if another task inspects this executor."""
    found = basics()
    with ExitStack() as held:
        stream = None
        try:
            if order["host"]:
                found["address"] = own_address(order["host"], order["port"])
                stream, desk = _connect(order, held)
                begin = _meet(stream, order["token"], found, held)
        except (OSError, ValueError) as error:
            found["unreachable"], stream = str(error), None
        if stream is None:
            if not _is_first_here(order["token"], held):
                return {}
        elif not begin["is_first"]:
            return {}
        else:
            found.update(_reach(begin["peers"]))
        found.update(look_around(order["looks"], order["limit_s"]))
        if stream is not None:
            with suppress(OSError, ValueError):  # Spark carries it, too
                # The desk answers once all have reported, which takes as long as the slowest may.
                desk.settimeout(order["wait_s"] + order["limit_s"] + _MARGIN_S)
                _say(stream, found)
                _hear(stream)  # others may not have tried to reach this one yet
    return found


def _connect(order: dict[str, Any], held: ExitStack) -> tuple[Any, socket.socket]:
    desk = socket.create_connection((order["host"], order["port"]), _CONNECT_S)
    held.enter_context(desk)
    desk.settimeout(order["wait_s"] + _MARGIN_S)
    return held.enter_context(desk.makefile("rwb")), desk


def _meet(stream: Any, token: str, found: dict[str, Any], held: ExitStack) -> dict[str, Any]:
    """Send hello to the driver, and wait for its order to begin; return the order."""
    listener = _listen(found)
    port = held.enter_context(listener).getsockname()[1] if listener else 0
    _say(stream, {"token": token, "port": port, **found})
    return _hear(stream)


def _is_first_here(token: str, held: ExitStack) -> bool:
    """Whether no other task of the executor is at it, where the driver cannot say so."""
    claim = held.enter_context(socket.socket(socket.AF_UNIX))
    try:
        # The kernel gives an abstract name to one process of the host; the token keeps runs apart.
        claim.bind(f"\0sparkdl-doctor {token} {os.getppid()} {_boot_id()}")
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def basics() -> dict[str, Any]:
    """Return the facts that need no connection and no child process."""
    versions = {"Python": platform.python_version(), "sparkdl": _own_version()}
    for package, distributions in PACKAGES.items():
        for name in distributions:
            with suppress(metadata.PackageNotFoundError):
                versions[package] = metadata.version(name)
                break
    host = socket.gethostname()
    package = _package()
    folders = [os.path.join(package, name) for name in _FOREIGN_FOLDERS]
    return {
        "executor": f"{host} {_boot_id()} {os.getppid()}",  # the daemon of its Python workers
        "host": host,
        "python": sys.executable,
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {name: version for name, version in versions.items() if version},
        "package": package,
        "foreign": [os.path.basename(path) for path in folders if os.path.isdir(path)],
    }


def own_address(host: str, port: int) -> str:
    """Return the address that a node here would have; sends nothing.

    Raises:
        OSError: if the driver's name cannot be resolved, or there is no way to it.
    """
    try:
        from sparkdl.core.settings import Environment
        from sparkdl.node.resources import own_host
    except Exception:  # noqa: BLE001 (another package named sparkdl raises whatever it likes)
        return ""
    return own_host((host, port), Environment.read())


def look_around(looks: dict[str, list[str]], limit_s: float) -> dict[str, Any]:
    """Run `diagnosis/look.py` for each of `looks`, all at once, each in a process of its own."""
    deadline_s = time.monotonic() + limit_s
    found: dict[str, Any] = {"imports": {}, "storage": {}}
    with ExitStack() as stack:
        began = [(words, _begin(words, limit_s, stack)) for words in looks.values()]
        for (topic, *rest), look in began:
            said, problem = _end(look, deadline_s, limit_s)
            if topic == "machine":
                found.update({"machine_error": problem} if said is None else {"machine": said})
            elif topic == "storage":
                found["storage"][rest[0]] = problem if said is None else said["error"]
            elif said != {}:  # not installed, and not requested
                found["imports"][rest[0]] = {"error": problem} if said is None else said
    return found


def _begin(words: list[str], limit_s: float, stack: ExitStack) -> tuple[Any, Any, Any]:
    """Start a process; return it, and the files that it writes to."""
    with ExitStack() as files:
        # Files, because a pipe that is not read would stop a process that prints much.
        out = files.enter_context(tempfile.TemporaryFile())
        err = files.enter_context(tempfile.TemporaryFile())
        stack.push(files.pop_all())
    process = subprocess.Popen(
        [sys.executable, "-m", "sparkdl.diagnosis.look", str(limit_s), *words],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        # `sys.path` has what Spark has added for this worker, and the child must import the same.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        # A group of its own, so that `_kill` also ends what it has started.
        start_new_session=True,
    )
    stack.callback(_kill, process)
    return process, out, err


def _end(look: tuple[Any, Any, Any], deadline_s: float, limit_s: float) -> tuple[Any, str]:
    """Wait for a process's answer; return it, and the problem if there is none."""
    process, out, err = look
    late = f"it took longer than {limit_s:g} s"
    try:
        process.wait(max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None, late
    # Its own alarm, see `look.py`.
    if process.returncode == -signal.SIGALRM:
        return None, late
    out.seek(0)
    err.seek(0)
    text = err.read().decode(errors="replace").strip().rpartition("\n")[2]
    with suppress(ValueError):
        return json.loads(out.read()), ""
    return None, text[:_LINE_CHARS] or f"it ended with status {process.returncode}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End it, and whatever it has started, unless it has ended."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_MARGIN_S)


def _listen(found: dict[str, Any]) -> socket.socket | None:
    """Listen as a node would; the kernel accepts for us. Note why that cannot be."""
    if not found.get("address"):
        return None
    family = socket.AF_INET6 if ":" in found["address"] else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((found["address"], 0))
        listener.listen(128)
    except OSError as error:
        listener.close()
        found["address_error"] = f"{found['address']}: {error}"
        return None
    return listener


def _reach(peers: list[list[Any]]) -> dict[str, Any]:
    cut = []
    for address, port in peers:
        try:
            socket.create_connection((address, port), _CONNECT_S).close()
        except OSError as error:
            cut.append({"address": address, "error": str(error)})
    return {"peers": len(peers), "cut": cut}


def _say(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def _hear(stream: Any) -> dict[str, Any]:
    line = stream.readline()
    if not line:
        raise ConnectionError("the driver has hung up")
    found: dict[str, Any] = json.loads(line)
    return found


def _own_version() -> str:
    """Return the version of sparkdl here; empty without it, or if another package hides it."""
    if not os.path.isfile(os.path.join(_package(), "version.py")):
        return ""  # do not run the code of another package
    try:
        from sparkdl.version import __version__
    except Exception:  # noqa: BLE001 (the files may be those of two packages)
        return ""
    return __version__


def _package() -> str:
    """Return the folder from which `import sparkdl` loads; empty if there is none."""
    with suppress(ImportError, ValueError):
        found = util.find_spec("sparkdl")
        if found and found.origin:
            return os.path.dirname(found.origin)
    return ""


def _boot_id() -> str:
    """Return an id that differs between hosts of the same name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()[:8]
    except OSError:
        return ""
