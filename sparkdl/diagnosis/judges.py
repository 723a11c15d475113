"""Judges, pure functions from facts to checks, and the report that these make."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from typing import Any, Literal, TypeVar

import msgspec

from sparkdl.core.errors import in_words
from sparkdl.core.texts import count, listed
from sparkdl.diagnosis.look import Facts, Machine
from sparkdl.diagnosis.probe import PACKAGES
from sparkdl.node.task import cannot_reach_driver

T = TypeVar("T")
Verdict = Literal["ok", "warning", "problem", "skipped"]
_COLUMNS = 100
_FRAMEWORKS = ("tensorflow", "keras", "torch", "jax")
_SAME_PARTS = {"Python": 2, "sparkdl": 9, "pyspark": 9, "numpy": 1}
"""How many parts of a version must match: with others a launch is refused, or fails later."""
_ABSENT = "not installed"
_SLOW_MBS = 100.0
_SHM_NBYTES = 512 << 20


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        verdict: `problem`: a launch fails, or hangs. `warning`: it may, or is slow. `skipped`: it
            could not be looked at, or was not wanted.
        finding: the observation, as a phrase.
        advice: what to change; empty if nothing.
    """

    name: str
    verdict: Verdict
    finding: str
    advice: str = ""

    @classmethod
    def of_error(cls, name: str, error: BaseException | str) -> Check:
        """Return the problem that a launch would raise; its last sentences are the advice."""
        text = error if isinstance(error, str) else in_words(error)
        # Errors of this library say what is wrong first, and then what to do.
        finding, _, advice = text.partition(". ")
        return cls(name, "problem", finding, advice)


@dataclass(frozen=True)
class Report:
    """All checks, in the order in which they were made.

    Attributes:
        seconds: how long they took.
    """

    checks: tuple[Check, ...]
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether no check found a problem; there may be warnings."""
        return all(check.verdict != "problem" for check in self.checks)

    def summary(self) -> str:
        """Return how many checks had which verdict."""
        counts = Counter(check.verdict for check in self.checks).most_common()
        return f"{', '.join(f'{n} {verdict}' for verdict, n in counts)}, in {self.seconds:.1f} s"

    def __str__(self) -> str:
        width = max((len(check.name) for check in self.checks), default=0)
        margin = " " * (len("problem  ") + width + 2)
        lines = []
        for check in self.checks:
            head = f"{check.verdict:<7}  {check.name:<{width}}  "
            lines += _wrapped(check.finding, head, margin)
            lines += _wrapped(check.advice, f"{margin}-> ", f"{margin}   ") if check.advice else []
        return "\n".join([*lines, self.summary()])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def to_json(self) -> str:
        """Return an object of `ok`, `seconds` and `checks`: objects as `Check` is."""
        found: dict[str, Any] = {"ok": self.ok, **asdict(self)}
        return msgspec.json.format(msgspec.json.encode(found)).decode()


def _wrapped(text: str, head: str, margin: str) -> list[str]:
    # Line by line, because `textwrap` would join them.
    found = [
        part
        for line in text.splitlines()
        for part in textwrap.wrap(
            line, _COLUMNS - len(margin), break_long_words=False, break_on_hyphens=False
        )
    ]
    return [(margin if at else head) + part for at, part in enumerate(found or [""])]


def grouped(items: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    found: dict[str, list[T]] = {}
    for one in items:
        found.setdefault(key(one), []).append(one)
    return dict(sorted(found.items()))


def places(facts: Sequence[Facts]) -> str:
    return listed(list(dict.fromkeys(one.place for one in facts)))


def so_many(some: Sequence[Facts], every: Sequence[Facts]) -> str:
    if len(some) == len(every):
        return every[0].place if len(every) == 1 else f"all {len(every)} executors"
    return f"{len(some)} of {len(every)} executors"


# Packages and Spark.


def judge_versions(
    driver: Facts, executors: Sequence[Facts], is_client: bool = False
) -> Iterator[Check]:
    """Compare packages; a client of Spark Connect may have another pyspark than the server."""
    same: list[str] = []
    for name in ("Python", "sparkdl", *PACKAGES):
        them = grouped(executors, lambda facts: facts.versions.get(name, "none"))  # noqa: B023
        here = driver.versions.get(name, "none")
        if name in _FRAMEWORKS and executors:  # which the driver need not have
            here = next(iter(them))
        if name == "pyspark" and is_client:
            continue
        if them.keys() <= {here}:
            same += [f"{name} {here}"] * (here != "none")
            continue
        parts = 9 if name in _FRAMEWORKS else _SAME_PARTS.get(name, 0)
        is_bad = "none" in them or len({_first(each, parts) for each in (here, *them)}) > 1
        there = "; ".join(f"{version} on {places(found)}" for version, found in them.items())
        finding = f"executors differ: {there}"
        advice = f"Install the same {name} on all executors"
        if name == "Python":
            advice = "Set PYSPARK_PYTHON (or spark.pyspark.python) to the same on all machines"
        if name not in _FRAMEWORKS:
            finding = f"{here} on the driver; {there}"
            advice += ", or ship an environment with spark.archives"
        yield Check(f"version of {name}", "problem" if is_bad else "warning", finding, advice)
    where = f"driver and {count(len(executors), 'executor')}" if executors else "driver"
    yield Check("versions", "ok", f"{where}: {', '.join(same)}")


def _first(version: str, parts: int) -> tuple[str, ...]:
    return tuple(version.split(".")[:parts])


def judge_packages(facts: Sequence[Facts]) -> Iterator[Check]:
    for folder, them in grouped(facts, lambda one: one.package).items():
        hidden = [one for one in them if folder and not one.has_sparkdl]
        if hidden:
            yield Check(
                "package",
                "problem",
                f"{places(hidden)}: import sparkdl finds another package, at {folder}",
                "In the Python environment there: pip uninstall sparkdl, then install "
                "sparkdl-cluster again, with pip's options --force-reinstall --no-deps",
            )


def judge_spark(driver: Facts, version: str, master: str) -> Check:
    """Compare Spark with the driver's pyspark; `master` is empty for a Spark Connect server."""
    own = driver.versions.get("pyspark", "")
    if not master:
        return Check("Spark", "ok", f"{version} behind a Spark Connect server")
    if own and _first(own, 2) != _first(version, 2):
        return Check(
            "Spark",
            "problem",
            f"the cluster at {master} runs Spark {version}, and the driver's pyspark is {own}",
            f"Install pyspark {version} at the driver",
        )
    return Check("Spark", "ok", f"{version} at {master}")


# Executors and nodes.


def judge_way(facts: Sequence[Facts], url: str) -> Iterator[Check]:
    hosts = len({each.host for each in facts})
    text = f"{count(len(facts), 'executor')} on {count(hosts, 'host')} answered"
    yield Check("executors", "ok", text)
    for problem, them in grouped(facts, lambda one: one.unreachable).items():
        if problem:
            text = cannot_reach_driver(places(them), url, problem)
            yield Check.of_error("way to the driver", text)
        elif url:
            yield Check("way to the driver", "ok", f"{url} is reached from {so_many(them, facts)}")


def judge_exchange(nbytes: int, answers: Sequence[float | str]) -> Check:
    """Judge an exchange, by the seconds of each node, or why there was none."""
    name = "all-reduce"
    if len(answers) < 2:
        return Check(name, "skipped", "there is one node")
    if problem := next((each for each in answers if isinstance(each, str)), ""):
        return Check(name, "skipped", problem)
    seconds = max(map(float, answers))
    mbs = nbytes / seconds / 1e6
    finding = (
        f"{nbytes >> 20} MiB in {seconds * 1e3:.1f} ms between {len(answers)} nodes, "
        f"{mbs:,.0f} MB/s"
    )
    if mbs >= _SLOW_MBS:
        return Check(name, "ok", finding)
    return Check(
        name,
        "warning",
        finding,
        "Every step waits for its gradients: use a faster network between the hosts, fewer nodes, "
        "or larger batches. SPARKDL_NODE_HOST chooses among several networks",
    )


def judge_imports(facts: Sequence[Facts], wanted: Collection[str]) -> Iterator[Check]:
    looked = [one for one in facts if one.has_sparkdl]
    names = dict.fromkeys([*wanted, *(name for one in looked for name in one.imports)])
    for name in names:
        for error, them in grouped(looked, partial(_import_error, name)).items():
            if not error:
                slowest_s = max(one.imports[name].seconds for one in them)
                text = f"on {so_many(them, looked)}, in {slowest_s:.1f} s at most"
                yield Check(f"import {name}", "ok", text)
                continue
            check = Check.of_error(f"import {name}", error)  # a launch's words, where it has some
            advice = check.advice or (
                f"Repair {name} in the Python environment there. If the import also hangs outside "
                "of Spark, check the file system, memory and cores"
            )
            finding = f"{places(them)}: {check.finding}"
            yield Check(check.name, "problem" if name in wanted else "warning", finding, advice)
    if looked and not names:
        yield Check("frameworks", "skipped", "no framework is installed or named")


def _import_error(name: str, facts: Facts) -> str:
    return facts.imports[name].error if name in facts.imports else _ABSENT


# Machines.


def judge_gpus(facts: Sequence[Facts], num_gpus: int | None) -> Iterator[Check]:
    """Compare the GPUs of each node with `num_gpus`, and with those that frameworks see."""
    pairs = _machines(facts)
    for has, them in grouped(pairs, lambda pair: _describe_gpus(pair[1])).items():
        text, machine = f"{places([one for one, _ in them])}: {has}", them[0][1]
        if machine.gpu_error:
            yield Check.of_error("GPUs", text)
        elif num_gpus and len(machine.gpus) < num_gpus:
            advice = "Install NVIDIA's driver, give the containers their GPUs, or lower num_gpus"
            yield Check("GPUs", "problem", f"{text}, and num_gpus={num_gpus}", advice)
        else:
            yield Check("GPUs", "ok", text)
    blind: dict[tuple[str, int, int], list[tuple[Facts, Machine]]] = {}
    for one, machine in pairs:
        for name, imported in one.imports.items():
            seen, there = len(imported.gpus), len(machine.gpus)
            if not imported.error and seen < there:
                blind.setdefault((name, seen, there), []).append((one, machine))
    for (name, seen, there), them in blind.items():
        yield Check(
            "GPUs",
            "warning" if seen else "problem",
            f"{places([one for one, _ in them])}: {name} sees {seen} of {count(there, 'GPU')}",
            f"Install a build of {name} for CUDA that driver {them[0][1].driver_version} supports, "
            "and look at CUDA_VISIBLE_DEVICES of the executor",
        )


def _describe_gpus(machine: Machine) -> str:
    if machine.gpu_error or not machine.driver_version:
        return machine.gpu_error or "no NVIDIA driver"
    names = [f"{many} {name}" for name, many in Counter(machine.gpus).items()]
    return f"{' and '.join(names) or 'no GPU'}, driver {machine.driver_version}"


def judge_machines(facts: Sequence[Facts], needs_shm: bool) -> Iterator[Check]:
    """Say whether sparkdl itself works there, and whether /dev/shm is large enough."""
    for error, them in grouped(facts, lambda one: one.machine_error).items():
        if error:
            yield Check(
                "executor's Python",
                "problem",
                f"{places(them)}: no node can start: {error}",
                "Install sparkdl-cluster in the executors' Python, with its dependencies",
            )
    sizes = [(machine.shm_nbytes, one) for one, machine in _machines(facts) if machine.shm_nbytes]
    if not (needs_shm and sizes):
        return
    least, one = min(sizes, key=lambda pair: pair[0])
    text = f"/dev/shm has {least / 2**30:.2f} GiB"
    if least >= _SHM_NBYTES:
        yield Check("shared memory", "ok", f"{text} at least")
        return
    yield Check(
        "shared memory",
        "warning",
        f"{one.place}: {text}: feeds do not use it, but the workers of a PyTorch DataLoader and "
        "NCCL do, and are killed or fail when it is full",
        "Give the container more: docker run --shm-size=2g, or an emptyDir with medium Memory at "
        "/dev/shm",
    )


def judge_storage(
    facts: Sequence[Facts], urls: Sequence[str], default_fs: str = ""
) -> Iterator[Check]:
    """Say whether Python finds each path or URL there; a training may not need `default_fs`."""
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
        "spark.hadoop.* settings apply only to the JVM"
    )


def _machines(facts: Sequence[Facts]) -> list[tuple[Facts, Machine]]:
    return [(one, one.machine) for one in facts if one.machine is not None]
