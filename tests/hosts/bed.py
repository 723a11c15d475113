"""Hosts made of Linux namespaces, and the links between them, which are cut without a word.

Runs in: the process of pytest, as root

Each host has a network address, a host name, processes, /tmp and /dev/shm of its own. They are
joined by a bridge in a network namespace that belongs to nobody else, so that no traffic leaves the
bed and nothing is left behind: namespaces vanish with their last process.

https://man7.org/linux/man-pages/man7/namespaces.7.html
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pyspark
import pytest

from sparkdl.core.deadline import Deadline
from tests.doubles.leaks import RUN_VARIABLE

IPV4 = "10.77.0.{}/24"
IPV6 = "fd77::{}/64"
SHARED = Path("/mnt/shared")
"""On every host: the same folder, as a shared file system is. /tmp is each host's own."""
MASTER_PORT = 7077
SOON_S = 120.0
_NOBODY = "02:00:00:00:00:fe"
"""A hardware address that no host has: frames to it are lost without a word."""
_OF_A_HOST = (
    *("--net", "--mount", "--uts", "--ipc", "--pid"),
    *("--fork", "--mount-proc", "--kill-child=SIGKILL"),
)
_INIT = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True: signal.pause()"
"""The first process of a host: the kernel reaps what it inherits."""
_never = threading.Event()


@cache
def why_not() -> str:
    """Return why this machine cannot make hosts; empty if it can."""
    missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} (Linux with util-linux and iproute2)"
    links = "ip link add bridge type bridge && ip link add port type veth peer name eth9"
    made = subprocess.run(
        ["unshare", *_OF_A_HOST, "sh", "-c", f"mount --make-rprivate / && {links}"],
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=False,
    )
    return f"namespaces cannot be made: {made.stderr.strip()}" if made.returncode else ""


@dataclass(frozen=True)
class Program:
    """A program on a host, and what it prints: one JSON value a line, among other lines."""

    host: Host
    process: subprocess.Popen[bytes]
    output: Path

    def events(self) -> list[dict[str, Any]]:
        """Return the lines so far that are JSON objects."""
        lines = self.output.read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def wait_for(self, event: str, within_s: float = SOON_S) -> dict[str, Any]:
        """Wait until it has printed `{"event": event, …}`; return that line.

        Raises:
            AssertionError: if it has not in time, or has ended before.
        """
        deadline = Deadline.after(within_s)
        while True:
            has_ended = self.process.poll() is not None
            for found in self.events():
                if found["event"] == event:
                    return found
            if has_ended or deadline.has_passed:
                how = "ended" if has_ended else f"is not there within {within_s:g} s"
                raise AssertionError(f"no {event!r}, {how}:\n{self.tail()}")
            _never.wait(0.02)

    def tail(self, lines: int = 60) -> str:
        """Return the last lines of what it has printed."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:])


class Host:
    """One host.

    Attributes:
        name: its host name.
        address: its address, IPv4 unless the bed is asked for another.
        hardware: the hardware address of its link.
    """

    def __init__(self, bed: Bed, name: str, number: int) -> None:
        self.name = name
        self.address = bed.address_of(number)
        self.hardware = f"02:00:00:00:01:{number:02x}"
        self._bed = bed
        self._port = f"p{number}"
        self._number = number
        self._first = _first_process(*_OF_A_HOST)
        self._number_of_programs = 0
        self._set_up()

    def run(self, *command: str, **more: str) -> Program:
        """Start a program with the bed's environment and `more`."""
        return self._run([*self.entering(), *command], more)

    def run_above(self, *command: str, **more: str) -> Program:
        """Start a program that has this host's network, and can start others on all hosts.

        It does so by their `entering`: it sees this machine's processes, and the shared folder.
        """
        enter = f"nsenter -t {self._first.pid} -n -u --"
        mounts = f"mount --make-rprivate /; {self._mounts()}; exec {enter}"
        above = ["unshare", "--mount", "sh", "-ec", f'{mounts} "$@"', "sh"]
        return self._run([*above, *command], more)

    def _run(self, command: Sequence[str], more: Mapping[str, str]) -> Program:
        self._number_of_programs += 1
        output = self._bed.folder / f"{self.name}-{self._number_of_programs}.log"
        with output.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._bed.environment(self) | dict(more),
            )
        self._bed.stack.callback(_end, process)
        return Program(self, process, output)

    @property
    def address_in_url(self) -> str:
        """Its address, in brackets if it is of IPv6."""
        return f"[{self.address}]" if ":" in self.address else self.address

    def add_address(self, address: str, device: str) -> None:
        """Add an address, with the length of its prefix, to a device (eth0, lo)."""
        # Without DAD, which takes a second, an address of IPv6 is there at once.
        without_dad = ("nodad",) if ":" in address else ()
        self._ip("address", "add", address, "dev", device, *without_dad)

    def know_only(self, **addresses: str) -> None:
        """Have this host know the addresses of these names alone."""
        lines = [f"{address} {name}\n" for name, address in addresses.items()]
        known = "".join(["127.0.0.1 localhost\n", *lines])
        (self._bed.folder / self.name / "hosts").write_text(known)

    def cut(self) -> None:
        """Take the cable out of the bridge: frames are lost both ways, and nobody is told."""
        self._bed.ip("link", "set", self._port, "nomaster")

    def mend(self) -> None:
        self._bed.ip("link", "set", self._port, "master", "bridge")

    def lose_what_comes(self) -> None:
        """Have frames to this host be lost, while those from it arrive."""
        self._bed.ip("link", "set", self._port, "type", "bridge_slave", "learning", "off")
        self._bed.ip("link", "set", self._port, "type", "bridge_slave", "flood", "off")
        self._bed.ip("link", "set", self._port, "type", "bridge_slave", "fdb_flush")

    def lose_what_goes(self) -> None:
        """Have frames from this host be lost, while those to it arrive."""
        for other in self._bed.hosts.values():
            if other is not self:
                self.lose_what_goes_to(other)

    def lose_what_goes_to(self, other: Host) -> None:
        """Have frames from this host to one other be lost: so there are no connections."""
        neighbour = (other.address, "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent")
        self._ip("neigh", "replace", *neighbour)

    def power_off(self) -> None:
        """End all its processes at once, and no peer hears of it."""
        self.cut()
        self._first.kill()

    def pause(self) -> None:
        """Stop all its processes; its kernel goes on answering."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_all(signal.SIGCONT)

    def processes(self, containing: str) -> list[psutil.Process]:
        """Return its processes whose command line contains a text."""
        return [p for p in self._processes() if containing in " ".join(_command(p))]

    def _processes(self) -> list[psutil.Process]:
        mine = _namespace(self._first.pid)
        return [
            p
            for p in psutil.process_iter()
            if p.pid != self._first.pid and mine == _namespace(p.pid)
        ]

    def _signal_all(self, number: signal.Signals) -> None:
        found: set[psutil.Process] = set()
        while new := set(self._processes()) - found:  # what one of them has started meanwhile
            for process in new:
                with suppress(psutil.Error):
                    process.send_signal(number)
            found |= new

    def _set_up(self) -> None:
        peer = ("peer", "name", "eth0", "address", self.hardware, "netns", str(self._first.pid))
        self._bed.ip("link", "add", self._port, "type", "veth", *peer)
        self._bed.ip("link", "set", self._port, "master", "bridge", "up")
        self.add_address(self._bed.network.format(10 + self._number), "eth0")
        self._ip("link", "set", "lo", "up")
        self._ip("link", "set", "eth0", "up")
        own = self._bed.folder / self.name
        (own / "tmp").mkdir(parents=True)
        names = [f"{self._bed.address_of(n)} {name}\n" for n, name in enumerate(self._bed.names)]
        (own / "hosts").write_text("".join(["127.0.0.1 localhost\n", *names]))
        self._shell(
            f"hostname {self.name}; mount --make-rprivate /; {self._mounts()}; "
            f"mount -t tmpfs none /dev/shm; {self._own_tmp(own)}"
        )

    def _mounts(self) -> str:
        """Return commands that give it the shared folder, and names of hosts."""
        folder = self._bed.folder
        return (
            f"mount -t tmpfs none /mnt; mkdir {SHARED}; mount --bind {folder}/shared {SHARED}; "
            f"mount --bind {folder}/{self.name}/hosts /etc/hosts"
        )

    def _own_tmp(self, own: Path) -> str:
        """Return commands that give it a /tmp in which only what it runs from is still seen."""
        commands = ""
        for number, folder in enumerate(_runs_from()):
            if folder.is_relative_to("/tmp"):
                keep = f"/mnt/keep-{number}"
                (own / "tmp" / folder.relative_to("/tmp")).mkdir(parents=True, exist_ok=True)
                commands += f"mkdir {keep}; mount --bind {folder} {keep}; "
        commands += f"mount --bind {own}/tmp /tmp; "
        for number, folder in enumerate(_runs_from()):
            if folder.is_relative_to("/tmp"):
                commands += f"mount --bind /mnt/keep-{number} {folder}; "
        return commands

    def _ip(self, *arguments: str) -> None:
        _run("nsenter", "-t", str(self._first.pid), "-n", "ip", *arguments)

    def _shell(self, commands: str) -> None:
        _run("nsenter", "-t", str(self._first.pid), "-m", "-u", "sh", "-ec", commands)

    def entering(self) -> list[str]:
        """Return what comes before the command of a program on this host."""
        namespaces = ("-m", "-u", "-i", "-n", "-p")
        return ["nsenter", "-t", str(self._first.pid), *namespaces, "--wd=/tmp", "--"]

    def close(self) -> None:
        _end_first(self._first)


class Bed:
    """Hosts by name, and the bridge between them.

    Args:
        folder: for logs, and for the folders of the hosts.
        network: `IPV4` or `IPV6`.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], stack: ExitStack, network: str = IPV4
    ) -> None:
        self.folder = folder
        self.network = network
        self.names = names
        self.stack = stack
        (folder / "shared").mkdir()
        self._switch = _first_process("--net")
        stack.callback(_end_first, self._switch)
        self.ip("link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        self.ip("link", "set", "bridge", "up")
        self.hosts: dict[str, Host] = {}
        for number, name in enumerate(names):
            host = self.hosts[name] = Host(self, name, number)
            stack.callback(host.close)

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def address_of(self, number: int) -> str:
        return self.network.format(10 + number).partition("/")[0]

    def ip(self, *arguments: str) -> None:
        """Run `ip` where the bridge is."""
        _run("nsenter", "-t", str(self._switch.pid), "-n", "ip", *arguments)

    def environment(self, host: Host) -> dict[str, str]:
        """Return what a program on a host has in its environment."""
        kept = ("PATH", "JAVA_HOME", "JAVA_TOOL_OPTIONS", "PYTHONPATH", "LANG", RUN_VARIABLE)
        found = {name: os.environ[name] for name in kept if name in os.environ}
        return found | {
            "HOME": "/tmp",
            "PYTHONUNBUFFERED": "1",
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "SPARK_LOCAL_IP": host.address,
            "SPARK_DAEMON_MEMORY": "256m",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "CUDA_VISIBLE_DEVICES": "",
        }

    def start_spark(self, master: str, workers: Mapping[str, int], **more: str) -> str:
        """Start a standalone master on one host and workers on others; return the master's URL.

        Args:
            workers: cores by host.
            more: in the environment of the workers.
        """
        home = Path(pyspark.__file__).parent
        deploy = "org.apache.spark.deploy"
        where = self[master]
        url = f"spark://{where.address_in_url}:{MASTER_PORT}"
        common = ("--webui-port", "0")
        daemon = where.run(
            f"{home}/bin/spark-class",
            f"{deploy}.master.Master",
            *("--host", where.address_in_url, "--port", str(MASTER_PORT)),
            *common,
        )
        _wait_for_text(daemon, "I have been elected leader")
        for name, cores in workers.items():
            self[name].run(
                f"{home}/bin/spark-class",
                f"{deploy}.worker.Worker",
                *("--host", self[name].address_in_url, "--cores", str(cores), "--memory", "2g"),
                *("--work-dir", "/tmp/work", *common, url),
                **more,
            )
        for name in workers:
            _wait_for_text(daemon, f"Registering worker {self[name].address_in_url}")
        return url


def bed_of(*names: str, network: str = IPV4) -> Any:
    """Return a fixture: a bed of hosts, all of whose processes end with it."""

    @pytest.fixture
    def bed(tmp_path: Path) -> Iterator[Bed]:
        if reason := why_not():
            pytest.skip(reason)
        with ExitStack() as stack:
            yield Bed(tmp_path, names, stack, network)

    return bed


# processes

_first_processes: dict[int, subprocess.Popen[bytes]] = {}


def _first_process(*namespaces: str) -> psutil.Process:
    """Start a process in new namespaces, which live until it ends."""
    started = subprocess.Popen(
        ["unshare", *namespaces, sys.executable, "-S", "-c", _INIT],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # where it complains about the end of its child
    )
    parent = psutil.Process(started.pid)
    deadline = Deadline.after(SOON_S)
    while not deadline.has_passed:
        for process in (parent, *parent.children()):
            # Looked at once: `unshare`, which is among the machine's processes, has it as well.
            command = _command(process)
            if command[:1] == [sys.executable] and command[-1] == _INIT:
                _first_processes[process.pid] = started
                return process
        _never.wait(0.01)
    raise TimeoutError(f"no namespaces after {SOON_S:g} s")


def _end_first(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
    _first_processes.pop(process.pid).wait(SOON_S)


def _runs_from() -> list[Path]:
    repository = Path(__file__).parents[2]
    java = [Path(os.environ["JAVA_HOME"])] if "JAVA_HOME" in os.environ else []
    return sorted({repository, Path(sys.prefix), Path(sys.base_prefix), *java})


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _command(process: psutil.Process) -> list[str]:
    try:
        command: list[str] = process.cmdline()
        return command
    except psutil.Error:
        return []


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOON_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # `nsenter`, which waits for the program: that ends with its host
    process.wait(SOON_S)


def _wait_for_text(program: Program, text: str) -> None:
    deadline = Deadline.after(SOON_S)
    while text not in program.output.read_text(errors="replace"):
        if program.process.poll() is not None or deadline.has_passed:
            raise AssertionError(f"no {text!r}:\n{program.tail()}")
        _never.wait(0.05)
