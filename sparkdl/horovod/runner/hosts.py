"""Horovod's ways to name hosts, `a:2,b:4` and hostfiles: which of them are this machine.

Runs in: driver
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

import psutil

from sparkdl.core.errors import ConfigError

_IN_LIST = re.compile(r"([\w.-]+|\[[0-9a-fA-F:]+\]):(\d+)")
_IN_FILE = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)")


def check_hosts(hosts: str | None, hostfile: str | None, num_proc: int) -> None:
    """Check that so many processes can run here, as far as anything is said of hosts.

    Args:
        hosts: like `localhost:4`.
        hostfile: path of a file with lines like `localhost slots=4`.

    Raises:
        ConfigError: if a host is another machine, has too few slots or is not written so.
    """
    if hosts and hostfile:
        raise ConfigError("hosts and hostfile: give one of them")
    if not (hosts or hostfile):
        return
    named = _listed(hosts) if hosts else _read(str(hostfile))
    for host, _ in named:
        if not is_here(host):
            raise ConfigError(
                f"{'hosts' if hosts else 'hostfile'}: {host} is not this machine, and processes "
                "are started on others by Spark: use sparkdl.horovod.spark.run"
            )
    slots = sum(count for _, count in named)
    if num_proc > slots:
        raise ConfigError(
            f"Requested more processes ({num_proc}) than there are available slots ({slots}); "
            "raise the slots of the hosts, or ask for fewer"
        )


def is_here(host: str) -> bool:
    """Whether a name or an address is this machine's."""
    if host in ("localhost", socket.gethostname()):
        return True
    own = {
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
    }
    try:
        infos = socket.getaddrinfo(host.strip("[]"), None)
    except OSError:  # nobody knows it
        return False
    found = {str(info[4][0]).partition("%")[0] for info in infos}
    return any(address in own or ip_address(address).is_loopback for address in found)


def _listed(hosts: str) -> Sequence[tuple[str, int]]:
    found = [_IN_LIST.fullmatch(part.strip()) for part in hosts.split(",")]
    if not all(found):
        raise ConfigError(f"hosts={hosts!r}: write it like localhost:2, or a:2,b:4")
    return [(match[1], int(match[2])) for match in found if match]


def _read(path: str) -> Sequence[tuple[str, int]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"hostfile: {error}") from error
    lines = [line.partition("#")[0].strip() for line in lines]
    found = [(line, _IN_FILE.match(line)) for line in lines if line]
    for line, match in found:
        if not match:
            raise ConfigError(f"hostfile={path!r}: {line!r} is not written like `a slots=2`")
    return [(match[1], int(match[2])) for _, match in found if match]
