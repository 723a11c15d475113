"""Judges of hosts: GPUs, memory, disk, storage. All functions are pure.

Runs in: driver
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from sparkdl.core.listing import count, listed
from sparkdl.diagnosis.facts import Facts, Machine, grouped, places, so_many
from sparkdl.diagnosis.report import Check, Verdict
from sparkdl.driver.slots.placement import Topology

_FREE = "free"
_SOME = 5
"""Executors on which the same is wrong, each with its own numbers."""
_MIN_DISK_NBYTES = 1 << 30
_MIN_SHM_NBYTES = 512 << 20
_MIN_DESCRIPTORS = 4096


def judge_gpus(
    facts: Sequence[Facts], num_gpus: int | None, topology: Topology | None
) -> Iterator[Check]:
    """Compare the GPUs of the hosts with those that frameworks see and with `num_gpus`."""
    machines = _machines(facts)
    with_driver = [(one, machine) for one, machine in machines if machine.has_driver]
    if not with_driver:
        assigned = topology.executor_gpus if topology else 0
        if num_gpus or assigned:
            asked = (
                f"num_gpus={num_gpus}"
                if num_gpus
                else f"{count(assigned, 'GPU')} for each executor"
            )
            yield Check(
                "GPUs",
                "problem",
                f"{asked}, and no executor sees an NVIDIA driver",
                "Install the driver on the hosts, give their containers the GPUs (the NVIDIA "
                "container toolkit), or ask for none: num_gpus=0",
            )
        elif machines:
            yield Check("GPUs", "ok", "there is none, and none is asked for")
        return
    if len(with_driver) < len(machines):
        without = [one for one, machine in machines if not machine.has_driver]
        yield Check(
            "GPUs",
            "problem" if num_gpus else "warning",
            f"no NVIDIA driver on {places(without)}, and other executors have one",
            "Keep the nodes on alike hosts, or train with num_gpus=0",
        )
    # One line for all that are alike: a cluster may have hundreds of executors.
    for has, them in grouped(with_driver, lambda pair: _describe_gpus(pair[1])).items():
        yield _judge_gpus_of(them, has, num_gpus)
    yield from _judge_seen_gpus(with_driver, num_gpus)


def _describe_gpus(machine: Machine) -> str:
    if machine.gpu_error:
        return machine.gpu_error
    names = Counter(gpu.name for gpu in machine.gpus)
    free = sum(gpu.state == _FREE for gpu in machine.gpus)
    return (
        f"{' and '.join(f'{many} {name}' for name, many in names.items()) or 'no GPU'}, "
        f"{free} free, driver {machine.driver_version}"
    )


def _judge_gpus_of(them: Sequence[tuple[Facts, Machine]], has: str, num_gpus: int | None) -> Check:
    """Return a check for executors that have the same GPUs."""
    where, machine = places([one for one, _ in them]), them[0][1]
    if machine.gpu_error:
        return Check.of_error("GPUs", f"{where}: {machine.gpu_error}")
    free = sum(gpu.state == _FREE for gpu in machine.gpus)
    if num_gpus is None or free >= num_gpus:
        return Check("GPUs", "ok", f"{where}: {has}")
    busy = [f"{gpu.uuid}: {gpu.state}" for gpu in machine.gpus if gpu.state != _FREE]
    advice = f"Ask for fewer than num_gpus={num_gpus}, or end what computes there"
    return Check("GPUs", "problem", f"{where}: {has}", f"{advice}: {listed(busy, '; ')}")


def _judge_seen_gpus(
    machines: Sequence[tuple[Facts, Machine]], num_gpus: int | None
) -> Iterator[Check]:
    """Yield a check for each framework that sees fewer GPUs than the host has."""
    blind: dict[tuple[str, int, int], list[tuple[Facts, Machine]]] = {}
    for one, machine in machines:
        for name, imported in one.imports.items():
            seen, there = len(imported.gpus), len(machine.gpus)
            if not imported.error and num_gpus != 0 and seen < there:
                blind.setdefault((name, seen, there), []).append((one, machine))
    for (name, seen, there), them in blind.items():
        yield Check(
            "GPUs",
            "warning" if seen else "problem",
            f"{places([one for one, _ in them])}: {name} sees {seen} of {count(there, 'GPU')}",
            f"Install a build of {name} for CUDA that driver {them[0][1].driver_version} supports, "
            "and look at CUDA_VISIBLE_DEVICES of the executor",
        )


def judge_machines(facts: Sequence[Facts], needs_shm: bool) -> Iterator[Check]:
    """Say whether there is memory and disk for feeds, and whether sparkdl itself works there.

    Args:
        needs_shm: whether what will run there shares memory by /dev/shm.
    """
    for error, them in grouped(facts, _python_error).items():
        if error:
            yield Check(
                "executor's Python",
                "problem",
                f"{places(them)}: no node can start: {error}",
                "Install sparkdl-cluster in the executors' Python, with what it needs",
            )
    machines = _machines(facts)
    if not machines:
        return
    on_host: dict[str, int] = {}
    for one, _ in machines:
        on_host[one.host] = on_host.get(one.host, 0) + 1
    yield from _each(
        "memory",
        machines,
        lambda one, m: _judge_memory(m, on_host[one.host]),
        lambda m, each: (
            f"at least {_nbytes(m.free_nbytes)} free{each}, of {_nbytes(m.memory_nbytes)}; "
            f"a node's feed holds at most {_nbytes(m.feed_nbytes)}"
        ),
        lambda m: m.free_nbytes,
    )
    yield from _each(
        "disk",
        machines,
        lambda _, m: _judge_disk(m),
        lambda m, each: (
            f"at least {_nbytes(m.disk_free_nbytes)} free{each}, in {m.folder}; a feed may use "
            f"{_nbytes(m.feed_disk_nbytes)}"
        ),
        lambda m: m.disk_free_nbytes,
    )
    yield from _each(
        "shared memory",
        machines,
        lambda _, m: _judge_shm(m, needs_shm),
        lambda m, each: f"/dev/shm has at least {_nbytes(m.shm_nbytes or 0)}{each}",
        lambda m: m.shm_nbytes or 0,
    )
    yield from _each(
        "descriptors",
        machines,
        lambda _, m: _judge_descriptors(m),
        lambda m, each: f"a process may open at least {m.descriptors:,} files{each}",
        lambda m: m.descriptors,
    )


def _python_error(facts: Facts) -> str:
    if not facts.has_sparkdl:  # the check of versions reports it
        return ""
    return facts.machine_error or (facts.machine.error if facts.machine else "")


Judged = tuple[Verdict, str, str]


def _each(
    name: str,
    machines: Sequence[tuple[Facts, Machine]],
    judge: Callable[[Facts, Machine], Judged | None],
    describe: Callable[[Machine, str], str],
    size: Callable[[Machine], Any],
) -> Iterator[Check]:
    """Yield a check for each executor with a problem, or one for the smallest if all are ok."""
    judged = [(one, judge(one, machine)) for one, machine in machines]
    bad = [(one, found) for one, found in judged if found is not None]
    for one, (verdict, finding, advice) in bad[:_SOME]:
        yield Check(name, verdict, f"{one.place}: {finding}", advice)
    if more := [one for one, _ in bad[_SOME:]]:
        yield Check(
            name, "warning", f"likewise {count(len(more), 'more executor')}: {places(more)}"
        )
    if not bad:
        _, least = min(machines, key=lambda pair: size(pair[1]))
        yield Check(name, "ok", describe(least, " on each executor" if len(machines) > 1 else ""))


def _judge_memory(machine: Machine, on_host: int) -> Judged | None:
    # Nodes of one host share its memory.
    wanted = machine.feed_nbytes * on_host
    if machine.free_nbytes >= wanted:
        return None
    return (
        "warning",
        f"{_nbytes(machine.free_nbytes)} of {_nbytes(machine.memory_nbytes)} are free, and the "
        f"feeds of {count(on_host, 'node')} may hold {_nbytes(wanted)} beside the models",
        "Set Feeding(memory_nbytes=…) lower, give the executors more memory, or fewer to a host",
    )


def _judge_disk(machine: Machine) -> Judged | None:
    if machine.folder_error:
        return (
            "problem",
            f"no file can be written in {machine.folder}: {machine.folder_error}",
            "Point spark.local.dir (SPARK_LOCAL_DIRS) to a folder that can be written to",
        )
    if machine.disk_free_nbytes >= _MIN_DISK_NBYTES:
        return None
    return (
        "warning",
        f"{_nbytes(machine.disk_free_nbytes)} are free in {machine.folder}, where a feed keeps "
        "the rows of later epochs that do not fit into memory",
        "Free some, or point spark.local.dir (SPARK_LOCAL_DIRS) to a larger disk",
    )


def _judge_shm(machine: Machine, needs_shm: bool) -> Judged | None:
    if machine.shm_nbytes is None or not needs_shm or machine.shm_nbytes >= _MIN_SHM_NBYTES:
        return None
    return (
        "warning",
        f"/dev/shm has {_nbytes(machine.shm_nbytes)}: feeds do not use it, but the workers of a "
        "PyTorch DataLoader and NCCL do, and are killed or fail when it is full",
        "Give the container more: docker run --shm-size=2g, or an emptyDir with medium Memory at "
        "/dev/shm",
    )


def _judge_descriptors(machine: Machine) -> Judged | None:
    # -1 stands for no limit.
    if machine.descriptors < 0 or machine.descriptors >= _MIN_DESCRIPTORS:
        return None
    return (
        "warning",
        f"a process may have {machine.descriptors} file descriptors, and each part of a feed that "
        "a node holds takes one",
        "Raise the hard limit for the executors (LimitNOFILE of the worker's service, --ulimit "
        "nofile of Docker)",
    )


def judge_storage(
    facts: Sequence[Facts], urls: Sequence[str], default_fs: str = ""
) -> Iterator[Check]:
    """Say whether Python finds each path or URL there.

    Args:
        default_fs: the one of `urls` that was not requested: a training may not need it.
    """
    looked = [one for one in facts if one.storage]
    for url in urls:
        name = f"path {url.removeprefix('file://')}"
        for error, them in grouped(looked, partial(_storage_error, url)).items():
            if error:
                verdict: Verdict = "warning" if url == default_fs else "problem"
                yield Check(name, verdict, f"{places(them)}: {error}", _storage_advice(url))
            else:
                yield Check(name, "ok", f"found from {so_many(them, looked)}")


def _storage_error(url: str, facts: Facts) -> str:
    return facts.storage.get(url, "")


def _storage_advice(url: str) -> str:
    scheme = url.partition("://")[0] if "://" in url else "file"
    if scheme in ("hdfs", "viewfs"):
        return (
            "Set HADOOP_HOME to Hadoop's folder, and JAVA_HOME, on the executors: Python opens "
            "HDFS by libhdfs. Behind Kerberos, look at the ticket (klist) of the executor's user"
        )
    if scheme == "file":
        return "Mount it on all hosts at the same path, or give a URL that all reach"
    return (
        "Give the executors' Python its own credentials and region, by environment or role: "
        "spark.hadoop.* settings are the JVM's alone"
    )


def _machines(facts: Iterable[Facts]) -> list[tuple[Facts, Machine]]:
    found = [(one, one.machine) for one in facts if one.machine is not None]
    return [(one, machine) for one, machine in found if not machine.error]


def _nbytes(number: int) -> str:
    for unit, factor in _UNITS.items():
        if abs(number) >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number} B"


_UNITS: Mapping[str, int] = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
