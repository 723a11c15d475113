"""The facts about a machine, and the processes that find them: an import or a storage may hang.

Runs in: driver, child

`python -m sparkdl.diagnosis.look LIMIT_S TOPIC …` prints one line of JSON. The kernel ends it after
LIMIT_S seconds, even if it hangs or its parent has died.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from pyarrow.fs import FileType

from sparkdl.core.errors import ConfigError, FrameworkMissingError, in_words
from sparkdl.core.settings import visible_gpus
from sparkdl.frameworks.framework import framework_named
from sparkdl.node.gpus import allowed_gpus, has_driver, list_gpus, open_nvml
from sparkdl.node.resources import HadoopClasspath
from sparkdl.node.task import missing_framework
from sparkdl.storage.systems import find_files, locate, open_storage

_SHM = Path("/dev/shm")
_LINE_CHARS = 400
_MARGIN_S = 5.0


class Machine(msgspec.Struct, frozen=True):
    shm_nbytes: int = 0
    """The size of /dev/shm; 0 where there is none."""
    driver_version: str = ""
    """Of NVIDIA's driver, if there is one."""
    gpus: tuple[str, ...] = ()
    """The names of those that a node may use."""
    gpu_error: str = ""


class Imported(msgspec.Struct, frozen=True):
    error: str = ""
    seconds: float = 0.0
    gpus: tuple[str, ...] = ()


class Facts(msgspec.Struct, frozen=True):
    """The facts about one executor, or about the driver; executors send them with these names.

    Attributes:
        executor: an id, unique also among the executors of one host.
        address: under which the others reach its node.
        unreachable: why it does not reach the driver.
        versions: of installed packages, by name; of Python as well.
        package: the folder from which `import sparkdl` loads there; empty if it fails.
        machine: `None` if that could not be looked at; `machine_error` says why, sparkdl's own
            modules that cannot be imported, for example.
        imports: by framework.
        storage: by path or URL, why it cannot be read; empty if it can.
    """

    executor: str
    host: str
    address: str = ""
    unreachable: str = ""
    versions: dict[str, str] = {}
    package: str = ""
    machine: Machine | None = None
    machine_error: str = ""
    imports: dict[str, Imported] = {}
    storage: dict[str, str] = {}

    @property
    def has_sparkdl(self) -> bool:
        """Whether sparkdl is installed there; if not, little is known."""
        return "sparkdl" in self.versions

    @property
    def place(self) -> str:
        return f"{self.host} ({self.address})" if self.address else self.host


def look_around(looks: list[list[str]], limit_s: float) -> dict[str, Any]:
    """Look at all topics at once, each in a process of its own; return fields of `Facts`."""
    found: dict[str, Any] = {"imports": {}, "storage": {}}
    if not looks:
        return found
    with ThreadPoolExecutor(len(looks)) as pool:
        answers = list(pool.map(partial(_answer, limit_s), looks))
    for (topic, *rest), (reply, problem) in zip(looks, answers, strict=True):
        if topic == "machine":
            found.update({"machine_error": problem} if reply is None else {"machine": reply})
        elif topic == "storage":
            found["storage"][rest[0]] = problem if reply is None else reply["error"]
        elif reply != {}:  # not installed, and not requested
            found["imports"][rest[0]] = {"error": problem} if reply is None else reply
    return found


def _answer(limit_s: float, words: list[str]) -> tuple[Any, str]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        # Files, because a process that this one has started may keep a pipe open.
        process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(limit_s), *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            # `sys.path` has what Spark has added, and the process must import the same.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        with suppress(subprocess.TimeoutExpired):  # in the kernel, where its alarm does not end it
            process.wait(limit_s + _MARGIN_S)
        if process.returncode in (None, -signal.SIGALRM):
            return None, f"it took longer than {limit_s:g} s"
        out.seek(0)
        err.seek(0)
        with suppress(ValueError):
            return json.loads(out.read()), ""
        text = err.read().decode(errors="replace").strip().rpartition("\n")[2]
        return None, text[:_LINE_CHARS] or f"it ended with status {process.returncode}"


def main(argv: list[str]) -> None:
    limit_s, topic, *arguments = argv
    signal.alarm(max(1, round(float(limit_s))))  # not caught: it ends C code as well
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # where libraries may print to
        answer.write(msgspec.json.encode(_TOPICS[topic](*arguments)))


def look_at_machine() -> Machine:
    """Return the resources that a node would use here; imports sparkdl, but no framework."""
    import sparkdl.node.agent  # noqa: F401 (a package that is missing shows here)

    shm_nbytes = shutil.disk_usage(_SHM).total if _SHM.is_dir() else 0
    return Machine(shm_nbytes, *_gpus())


def look_at_framework(name: str, is_wanted: str) -> Imported | dict[str, Any]:
    """Import a framework as a node does, and ask it for GPUs; nothing if it is absent unasked."""
    problem = missing_framework(name)
    if problem is not None:
        return Imported(problem.text) if is_wanted == "wanted" else {}
    framework = framework_named(name)
    # Before the import, at which frameworks read it; what is set on the executor wins.
    os.environ.update({**framework.import_environment, **os.environ})
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others may compute there
    began_s = time.monotonic()
    try:
        framework.import_modules()
        seconds = time.monotonic() - began_s
        return Imported(seconds=seconds, gpus=tuple(framework.gpus()))
    except Exception as error:  # noqa: BLE001 (a broken installation raises anything)
        return Imported(in_words(error))


def look_at_storage(url: str) -> dict[str, str]:
    """Find a path or URL as a node does; return why it cannot."""
    # libhdfs needs the paths of Hadoop's jars in CLASSPATH.
    if (jars := HadoopClasspath.begin()) is not None:
        jars.finish()
    try:
        storage, path = locate(url)
        system = open_storage(storage)
        is_there = system.get_file_info(path).type != FileType.NotFound
        # A pattern is no file of its own.
        if not is_there and next(iter(find_files(system, path)), None) is None:
            return {"error": "there is no such file or folder, and nothing that fits a pattern"}
    except (ConfigError, OSError, ValueError) as error:
        return {"error": in_words(error)}
    return {"error": ""}


def _gpus() -> tuple[str, tuple[str, ...], str]:
    if not has_driver():
        return "", (), ""
    try:
        with open_nvml() as nvml:
            found = allowed_gpus(list_gpus(nvml), visible_gpus())
            version = str(nvml.nvmlSystemGetDriverVersion())
            return version, tuple(gpu.name for gpu in found), ""
    except FrameworkMissingError as error:
        return "", (), str(error)


_TOPICS: dict[str, Callable[..., Any]] = {
    "machine": look_at_machine,
    "framework": look_at_framework,
    "storage": look_at_storage,
}

if __name__ == "__main__":
    main(sys.argv[1:])
