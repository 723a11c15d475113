"""What is known of the driver and of each executor, before anybody judges it.

Runs in: driver, feeder

Executors send it as JSON, of these names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from sparkdl.core.listing import listed

T = TypeVar("T")


class Gpu(msgspec.Struct, frozen=True):
    """A GPU of a host as NVIDIA's library NVML lists it.

    Attributes:
        state: `free`, or in words which process has it.
    """

    name: str
    uuid: str
    state: str = "free"


class Machine(msgspec.Struct, frozen=True):
    """What a node would find on its executor. Sizes in bytes.

    Attributes:
        error: why sparkdl itself does not work there; the rest is unknown then.
        memory_nbytes: in all, for this process and those beside it.
        feed_nbytes: what a node's feed holds in memory by default.
        folder: where a node puts files; rows that memory has no room for, too.
        folder_error: why no file can be written there.
        feed_disk_nbytes: what a node's feed holds on that disk by default.
        shm_nbytes: the size of /dev/shm; `None` where there is none.
        descriptors: how many a process may have at most.
        has_driver: whether there is an NVIDIA driver.
        gpus: those that a node may use, with the driver's version.
        gpu_error: why they cannot be listed.
        tls_error: why the host's own certificate cannot be used.
    """

    error: str = ""
    memory_nbytes: int = 0
    free_nbytes: int = 0
    feed_nbytes: int = 0
    folder: str = ""
    folder_error: str = ""
    disk_free_nbytes: int = 0
    feed_disk_nbytes: int = 0
    shm_nbytes: int | None = None
    descriptors: int = 0
    has_driver: bool = False
    driver_version: str = ""
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = ""
    tls_error: str = ""


class Imported(msgspec.Struct, frozen=True):
    """What came of importing a framework.

    Attributes:
        error: why it cannot be imported, or has not been in time.
        is_missing: it is not installed.
        gpus: those that it can compute on, in its own words.
    """

    error: str = ""
    is_missing: bool = False
    seconds: float = 0.0
    gpus: tuple[str, ...] = ()


class Cut(msgspec.Struct, frozen=True):
    """Another executor that this one does not reach."""

    address: str
    error: str


class Facts(msgspec.Struct, frozen=True):
    """What is known of an executor, or of the driver.

    Attributes:
        executor: tells executors apart, also those of one host.
        address: under which the others would reach its nodes.
        address_error: why it has none, or no node could listen there.
        unreachable: why it does not reach the driver; most of the rest is unknown then.
        versions: of installed packages, by name; of Python as well.
        package: the folder of what is imported as sparkdl there; empty if there is none.
        foreign: folders in it that belong to another package named sparkdl.
        peers: how many other executors it has tried to reach.
        machine: `None` if that could not be looked at; `machine_error` says why.
        imports: by framework.
        storage: by path or URL, why it cannot be read; empty if it can.
    """

    executor: str
    host: str
    python: str = ""
    platform: str = ""
    address: str = ""
    address_error: str = ""
    unreachable: str = ""
    versions: dict[str, str] = {}
    package: str = ""
    foreign: tuple[str, ...] = ()
    peers: int = 0
    cut: tuple[Cut, ...] = ()
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
        """Where it is, for people."""
        return f"{self.host} ({self.address})" if self.address else self.host


def grouped(items: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    """Return the items by what `key` says of each, in the order of that."""
    found: dict[str, list[T]] = {}
    for one in items:
        found.setdefault(key(one), []).append(one)
    return dict(sorted(found.items()))


def places(facts: Sequence[Facts]) -> str:
    """Return where they are, for people."""
    return listed(list(dict.fromkeys(one.place for one in facts)))


def so_many(some: Sequence[Facts], every: Sequence[Facts]) -> str:
    """Return how many they are, for people."""
    if len(some) == len(every):
        return every[0].place if len(every) == 1 else f"all {len(every)} executors"
    return f"{len(some)} of {len(every)} executors"
