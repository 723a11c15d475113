"""`sparkdl.doctor`: checks a cluster as a launch would, and says what to change.

Runs in: driver
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from sparkdl.control.tls import choose_tls
from sparkdl.core.errors import ConfigError, SparkdlError, in_words
from sparkdl.core.jobs import context_of
from sparkdl.core.options import Startup
from sparkdl.core.paths import absolute_url
from sparkdl.core.settings import Environment
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.diagnosis import judges, machine_judges, probe
from sparkdl.diagnosis.facts import Facts
from sparkdl.diagnosis.report import Check, Report
from sparkdl.driver.slots.placement import Topology
from sparkdl.frameworks.framework import TRAINING, framework_named

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from sparkdl.diagnosis.executors import Survey

_log = logging.getLogger(__name__)

WAIT_S = 30.0
"""How long the first executors wait for the last."""
LIMIT_S = 120.0
_MOST_TASKS = 1024
_NO_SPARK = Check(
    "Spark",
    "skipped",
    "there is no session: this machine alone is looked at",
    "sparkdl doctor --master …, or sparkdl.doctor(spark) in a program or notebook",
)
_FATAL = {
    *("Spark job", "slots", "executors", "driver address", "way to the driver", "addresses"),
    *("ways between executors", "executor's Python", "TLS", "version of sparkdl"),
}
"""Checks whose problems make every launch fail, so that no launch is tried."""


@dataclass(frozen=True)
class Asked:
    """The requirements of the training.

    Attributes:
        nodes: `None` for one on each executor.
        framework: `None` for each that is installed.
    """

    nodes: int | None = None
    framework: str | None = None
    num_gpus: int | None = None
    paths: tuple[str, ...] = ()
    tls: bool | None = None
    is_quick: bool = False
    limit_s: float = LIMIT_S
    wait_s: float = WAIT_S

    def __post_init__(self) -> None:
        self.spec(1 if self.nodes is None else self.nodes)
        Startup(tls=self.tls)
        if self.framework is not None:
            framework_named(self.framework)
        for name in ("limit_s", "wait_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above zero seconds")

    def spec(self, nodes: int) -> ClusterSpec:
        """Return what `launch` would make of it."""
        framework = self.framework or "plain"
        return ClusterSpec("doctor", plan_nodes(nodes), framework, num_gpus=self.num_gpus)

    def looks(self, urls: Iterable[str]) -> dict[str, list[str]]:
        """Return what `diagnosis/look.py` is to look at, by name."""
        wanted = [] if self.framework in (None, "plain") else [str(self.framework)]
        frameworks = wanted or (TRAINING if self.framework is None else ())
        kind = "wanted" if wanted else "if there"
        return {
            "machine": ["machine"],
            **{f"framework {name}": ["framework", name, kind] for name in frameworks},
            **{f"storage {url}": ["storage", url] for url in urls},
        }

    @property
    def wanted(self) -> tuple[str, ...]:
        """The frameworks that have to be there."""
        return () if self.framework in (None, "plain") else (str(self.framework),)


def doctor(  # noqa: PLR0913 (one option, one name)
    spark: SparkSession | SparkContext | None = None,
    nodes: int | None = None,
    *,
    framework: str | None = None,
    num_gpus: int | None = None,
    paths: Sequence[str] = (),
    tls: bool | None = None,
    quick: bool = False,
    limit_s: float = LIMIT_S,
    wait_s: float = WAIT_S,
) -> Report:
    """Check the driver and executors as a launch would; docs/doctor.md lists the checks.

    Every check has a time limit: an executor that does not answer is a finding.

    Args:
        spark: the session (or context); `None` for the active one. Without any, this machine alone
            is looked at.
        nodes: how many the training will have; by default one on each executor.
        framework: its framework, `plain` for none; by default all installed ones are imported.
        num_gpus: GPUs for each node, as for `launch`.
        paths: paths or URLs that nodes read or write; Hadoop's default file system is looked at
            anyway.
        tls: as for `Startup`.
        quick: whether to leave out the launch that measures feed and all-reduce.
        limit_s: seconds for whatever may hang: an import, a storage.
        wait_s: seconds that the first executors wait for the last.

    Returns:
        The report, which a notebook shows as a table.

    Raises:
        ConfigError: if an argument cannot be.
    """
    paths = (paths,) if isinstance(paths, str) else tuple(paths)
    asked = Asked(nodes, framework, num_gpus, paths, tls, quick, limit_s, wait_s)
    return examine(_session(spark), asked)


def examine(
    spark: SparkSession | None,
    asked: Asked,
    why_not: Check = _NO_SPARK,
    began_s: float | None = None,
) -> Report:
    """Make all checks.

    Args:
        why_not: what to say where there is no session.
        began_s: when the session was asked for, on the monotonic clock; now by default.
    """
    began_s = time.monotonic() if began_s is None else began_s
    checks = list(_here(asked, why_not) if spark is None else _there(spark, asked))
    return Report(tuple(checks), time.monotonic() - began_s)


def _session(spark: SparkSession | SparkContext | None) -> SparkSession | None:
    from sparkdl.driver.executors.sessions import session_of

    try:
        return session_of(spark)
    except ConfigError:
        return None


def _guarded(name: str, judge: Callable[..., Any], *arguments: Any) -> Iterator[Check]:
    """Yield the checks of a judge; if it fails itself, that is one, and hides no other."""
    try:
        found = judge(*arguments)
        yield from [found] if isinstance(found, Check) else found
    except SparkdlError as error:
        yield Check.of_error(name, error)
    except Exception as error:  # noqa: BLE001 (whatever it is, the other checks are wanted)
        _log.debug("The check of %s failed", name, exc_info=True)
        yield Check(name, "warning", f"could not be checked: {in_words(error)}")


def _here(asked: Asked, why_not: Check) -> Iterator[Check]:
    """Check this machine, where there is no Spark: as for `executor="local"`."""
    yield why_not
    urls = [absolute_url(path, "file://", os.getcwd()) for path in asked.paths]
    yield from _guarded("TLS", _judge_tls, asked, "")
    looks = asked.looks(urls)
    driver = _driver(looks, asked.limit_s)
    yield from _guarded("versions", judges.judge_versions, driver, [])
    yield from _guarded("package", judges.judge_packages, [driver])
    yield from _judge_facts([driver], _Paths(urls), asked, None)


def _driver(looks: Mapping[str, list[str]], limit_s: float) -> Facts:
    found = {**probe.basics(), **probe.look_around(dict(looks), limit_s)}
    return msgspec.convert(found, Facts)


def _there(spark: SparkSession, asked: Asked) -> Iterator[Check]:
    """Check a session's cluster."""
    found: list[Check] = []
    sizes: list[_Size] = []
    for check in _looked_at(spark, asked, sizes):
        found.append(check)
        yield check
    is_lost = any(each.verdict == "problem" and each.name in _FATAL for each in found)
    # A launch that must fail would only repeat these problems, after its whole timeout.
    if asked.is_quick or is_lost or not sizes:
        why = "not wanted" if asked.is_quick else "a launch would fail, see the problems above"
        yield Check("feed and all-reduce", "skipped", why)
        return
    from sparkdl.diagnosis.measure import measure

    yield from measure(spark, sizes[0].nodes, asked.tls)


def _looked_at(spark: SparkSession, asked: Asked, sizes: list[_Size]) -> Iterator[Check]:
    """Make all checks that need no launch; append the size of the cluster to `sizes`."""
    from sparkdl.driver.executors.sessions import default_fs
    from sparkdl.driver.slots.advice import costly_settings, encrypting_setting

    root = default_fs(spark)
    wanted = [absolute_url(path, root, os.getcwd()) for path in asked.paths]
    paths = _Paths(wanted, "" if root == "file://" else f"{root}/")
    looks = {f"storage {url}": ["storage", url] for url in paths.all}
    driver = _driver(looks, asked.limit_s)
    yield from _guarded("package", judges.judge_packages, [driver])
    yield from _guarded("Spark", lambda: _judge_spark(spark, driver))
    yield from _guarded("slots", _judge_slots, spark, asked, sizes)
    # Without an answer from Spark, one task for each node that is asked for.
    size = sizes[0] if sizes else _Size(None, asked.nodes or 1, asked.nodes or 1)
    yield from _guarded("TLS", lambda: _judge_tls(asked, encrypting_setting(spark)))
    looks = asked.looks(paths.all)
    yield from _guarded("executors", _survey, spark, asked, size, looks, driver, paths)
    yield from _guarded(
        "settings",
        lambda: judges.judge_settings(
            costly_settings(spark.conf.get, spark.version), size.topology
        ),
    )


@dataclass(frozen=True)
class _Paths:
    """The requested URLs, and Hadoop's default file system unless it is local."""

    wanted: Sequence[str]
    default_fs: str = ""

    @property
    def all(self) -> list[str]:
        return list(dict.fromkeys([*filter(None, [self.default_fs]), *self.wanted]))


@dataclass(frozen=True)
class _Size:
    """The numbers of tasks and nodes; `topology` is `None` where it is unknown."""

    topology: Topology | None
    nodes: int
    slots: int


def _judge_spark(spark: SparkSession, driver: Facts) -> Check:
    master = "" if context_of(spark) is None else spark.conf.get("spark.master", "a master")
    return judges.judge_spark(driver, spark.version, str(master))


def _judge_slots(spark: SparkSession, asked: Asked, sizes: list[_Size]) -> Iterator[Check]:
    """Place the nodes as a launch would; append the size of the cluster to `sizes`."""
    from sparkdl.driver.slots import preflight

    topology = preflight.read_topology(spark, asked.spec(asked.nodes or 1))
    if topology is None:
        size = _Size(None, asked.nodes or 1, asked.nodes or 1)
    else:
        size = _Size(topology, asked.nodes or max(1, len(topology.cores)), topology.slots)
        if topology.is_dynamic:  # so that Spark asks for executors
            size = replace(size, slots=max(size.slots, size.nodes))
    sizes.append(replace(size, slots=max(1, min(_MOST_TASKS, size.slots))))
    placing = preflight.placing_of(spark, asked.spec(size.nodes), topology)
    keeps = "keep their slots" if placing.is_attached else "give their slots back once they run"
    yield Check("slots", "ok", f"{placing.why}; nodes {keeps}")


def _judge_tls(asked: Asked, setting: str) -> Iterator[Check]:
    """Choose TLS as a launch would."""
    tls = choose_tls(asked.tls, setting)
    why = f"as {setting} is" if setting and asked.tls is None else "as asked for"
    text = f"on, {why}" if tls else "off: connections of sparkdl carry a token, in plain text"
    yield Check("TLS", "ok", text)


def _survey(
    spark: SparkSession,
    asked: Asked,
    size: _Size,
    looks: Mapping[str, list[str]],
    driver: Facts,
    paths: _Paths,
) -> Iterator[Check]:
    """Ask the executors; yield the checks of their answers."""
    from sparkdl.diagnosis.desk import Desk
    from sparkdl.diagnosis.executors import survey
    from sparkdl.driver.executors.sessions import driver_host
    from sparkdl.driver.slots.spark_errors import explain_job_failure

    is_client = context_of(spark) is None
    desk = Desk(size.slots, asked.wait_s)
    try:
        environment = Environment.read()
        host = environment.driver_host or driver_host(spark)
        desk.open(host, environment.driver_ports)
    except SparkdlError as error:
        yield Check.of_error("driver address", error)
    else:
        yield Check("driver address", "ok", f"listens at {desk.url}")
    told: Survey = survey(spark, desk, looks, asked.limit_s, desk.address)
    if told.error is not None:
        yield from _guarded("Spark job", _raise, explain_job_failure(told.error))
    waited_s = asked.wait_s + asked.limit_s
    came = told.expected if told.error else told.tasks  # or the error says why they have not
    yield from _guarded(
        "executors",
        *(judges.judge_executors, told.facts, told.silent, came, told.expected, waited_s),
    )
    known = [*told.facts, *told.silent]
    yield from _guarded("versions", judges.judge_versions, driver, known, is_client)
    here = (driver.host, driver.package)  # is judged already
    others = [one for one in known if (one.host, one.package) != here]
    yield from _guarded("package", judges.judge_packages, others)
    yield from _guarded("addresses", judges.judge_addresses, told.facts, told.url)
    yield from _judge_facts(told.facts, paths, asked, size.topology)
    bad = [url for url, error in driver.storage.items() if error]
    # Only what fails there: that the driver finds a path says nothing of the executors.
    at_driver = msgspec.structs.replace(driver, host="the driver")
    yield from _guarded("paths", machine_judges.judge_storage, [at_driver], bad, paths.default_fs)


def _raise(error: Exception) -> Iterator[Check]:
    raise error


def _judge_facts(
    facts: Sequence[Facts], paths: _Paths, asked: Asked, topology: Topology | None
) -> Iterator[Check]:
    if asked.framework != "plain":
        yield from _guarded("frameworks", judges.judge_imports, facts, asked.wanted)
    yield from _guarded("GPUs", machine_judges.judge_gpus, facts, asked.num_gpus, topology)
    needs_shm = asked.framework in (None, "torch")
    yield from _guarded("executor's Python", machine_judges.judge_machines, facts, needs_shm)
    yield from _guarded("paths", machine_judges.judge_storage, facts, paths.all, paths.default_fs)
