"""Facts about the driver and each executor, before they are judged.

Runs in: driver, feeder

Executors send them with these names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from sparkdl.core.listing import listed

T = TypeVar("T")


class Machine(msgspec.Struct, frozen=True):
    """The resources of an executor that a node would use. Sizes in bytes.

    Attributes:
        memory_nbytes: the total, shared by this process and those beside it.
        feed_nbytes: the default limit of a node's feed in memory.
        folder: where a node writes files, including rows that do not fit into memory.
        feed_disk_nbytes: the default limit of a node's feed on that disk.
        shm_nbytes: the size of /dev/shm; `None` where there is none.
        driver_version: of NVIDIA's driver, if there is one.
        gpus: the names of the GPUs that a node may use.
        gpu_error: why they cannot be listed.
    """

    memory_nbytes: int = 0
    free_nbytes: int = 0
    feed_nbytes: int = 0
    folder: str = ""
    disk_free_nbytes: int = 0
    feed_disk_nbytes: int = 0
    shm_nbytes: int | None = None
    driver_version: str = ""
    gpus: tuple[str, ...] = ()
    gpu_error: str = ""


class Imported(msgspec.Struct, frozen=True):
    """The result of importing a framework.

    Attributes:
        error: why the import failed, or that it took too long.
        gpus: the GPUs that the framework can use, as it names them.
    """

    error: str = ""
    seconds: float = 0.0
    gpus: tuple[str, ...] = ()


class Facts(msgspec.Struct, frozen=True):
    """The facts about one executor, or about the driver.

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
        """Its host and address, as text for a report."""
        return f"{self.host} ({self.address})" if self.address else self.host


def grouped(items: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    """Group the items by `key`, sorted by it."""
    found: dict[str, list[T]] = {}
    for one in items:
        found.setdefault(key(one), []).append(one)
    return dict(sorted(found.items()))


def places(facts: Sequence[Facts]) -> str:
    """List their hosts and addresses, as text for a report."""
    return listed(list(dict.fromkeys(one.place for one in facts)))


def so_many(some: Sequence[Facts], every: Sequence[Facts]) -> str:
    """Say how many of the executors `some` are, as text for a report."""
    if len(some) == len(every):
        return every[0].place if len(every) == 1 else f"all {len(every)} executors"
    return f"{len(some)} of {len(every)} executors"
