"""`sparkdl.doctor`: checks a cluster as a launch would, and says what to change."""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from sparkdl.control.ports import listening_socket
from sparkdl.core.errors import (
    ConfigError,
    FrameworkMissingError,
    ReservationTimeoutError,
    SparkdlError,
    in_words,
)
from sparkdl.core.files import absolute_url
from sparkdl.core.jobs import cancel_jobs, context_of, named_jobs, tagged_jobs
from sparkdl.core.options import Feeding, Recovery, Startup
from sparkdl.core.settings import Environment
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.texts import count
from sparkdl.core.world import host_port
from sparkdl.diagnosis import judges, probe
from sparkdl.diagnosis.judges import Check, Report
from sparkdl.diagnosis.look import Facts, look_around
from sparkdl.driver.launch import launch
from sparkdl.driver.options import Observe
from sparkdl.driver.slots.placement import Topology, placement_of, read_topology
from sparkdl.driver.slots.spark_errors import explain_job_failure, raised_in_task
from sparkdl.driver.threads import begin
from sparkdl.frameworks.framework import TRAINING, framework_named

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from sparkdl.node.context import NodeContext

_log = logging.getLogger(__name__)

LIMIT_S = 120.0
START_S = 60.0
_SESSION_S = 120.0
"""A master that does not answer is asked for ever on YARN, and for a minute elsewhere."""
_STOP_S = 30.0
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}
_MOST_TASKS = 1024
_EXCHANGED_NBYTES = 16 << 20
_NO_SPARK = Check(
    "Spark",
    "skipped",
    "there is no session: only this machine is checked",
    "sparkdl doctor --master …, or sparkdl.doctor(spark) in a program or notebook",
)
_FATAL = {
    *("Spark job", "slots", "executors", "driver address", "way to the driver"),
    *("version of Python", "version of sparkdl", "package"),
}
"""Checks whose problems make every launch fail, so that no launch is tried."""


@dataclass(frozen=True)
class Requirements:
    """The requirements of the training, see `doctor`."""

    nodes: int | None = None
    framework: str | None = None
    num_gpus: int | None = None
    paths: tuple[str, ...] = ()
    tls: bool | None = None
    limit_s: float = LIMIT_S

    def __post_init__(self) -> None:
        self.spec(1 if self.nodes is None else self.nodes)
        Startup(tls=self.tls)
        if self.framework is not None:
            framework_named(self.framework)
        if not self.limit_s > 0:
            raise ConfigError(f"limit_s={self.limit_s} must be above zero seconds")

    def spec(self, nodes: int) -> ClusterSpec:
        framework = self.framework or "plain"
        return ClusterSpec("doctor", plan_nodes(nodes), framework, num_gpus=self.num_gpus)

    def looks(self, urls: Iterable[str]) -> list[list[str]]:
        frameworks = self.wanted or (TRAINING if self.framework is None else ())
        kind = "wanted" if self.wanted else "if there"
        return [
            ["machine"],
            *(["framework", name, kind] for name in frameworks),
            *(["storage", url] for url in urls),
        ]

    @property
    def wanted(self) -> tuple[str, ...]:
        return () if self.framework in (None, "plain") else (str(self.framework),)


def doctor(
    spark: SparkSession | SparkContext | None = None,
    nodes: int | None = None,
    *,
    framework: str | None = None,
    num_gpus: int | None = None,
    paths: Sequence[str] = (),
    tls: bool | None = None,
    limit_s: float = LIMIT_S,
) -> Report:
    """Check the driver and executors as a launch would; docs/deployment.md lists the checks.

    Every check has a time limit: an executor that does not answer is a finding.

    Args:
        spark: the session (or context); `None` for the active one. Without any, only this
            machine is checked.
        nodes: how many the training will have; by default one on each executor.
        framework: its framework, `plain` for none; by default all installed ones are imported.
        num_gpus: GPUs for each node, as for `launch`.
        paths: paths or URLs that nodes read or write; Hadoop's default file system is looked at
            anyway.
        tls: as for `Startup`.
        limit_s: time limit of the executors' answers, of an import, and of a storage check.

    Returns:
        The report, which a notebook shows as a table.

    Raises:
        ConfigError: if an argument is invalid.
    """
    paths = (paths,) if isinstance(paths, str) else tuple(paths)
    needs = Requirements(nodes, framework, num_gpus, paths, tls, limit_s)
    return examine(_session(spark), needs)


def diagnose(options: argparse.Namespace) -> Report:
    """Do what `sparkdl doctor` asks for: start Spark if a master is named, examine it, stop it."""
    needs = Requirements(
        nodes=options.nodes,
        framework=options.framework,
        num_gpus=options.num_gpus,
        paths=tuple(options.path),
        tls=options.tls,
        limit_s=options.limit,
    )
    if wrong := [text for text in options.conf if not text.partition("=")[2]]:
        raise ConfigError(f"--conf {wrong[0]!r}: give KEY=VALUE")
    if options.master and options.remote:
        raise ConfigError("--master and --remote cannot both be given: leave one out")
    where = options.master or options.remote
    if not where:
        if options.conf:
            raise ConfigError(
                "--conf sets options of Spark, and no Spark is examined: add --master or --remote"
            )
        return examine(None, needs)
    began_s = time.monotonic()
    try:
        # In a daemon, because a call of py4j cannot be interrupted.
        spark = begin(partial(_start, options), "sparkdl-doctor-spark").result(_SESSION_S)
    except Exception as error:  # noqa: BLE001 (py4j's, Spark's, anybody's; or the time is over)
        why = raised_in_task(error) if str(error) else f"no answer within {_SESSION_S:g} s"
        finding = f"no session at {where}: {why}"
        advice = "Check address and port, the master's log, and that spark.driver.host is an "
        advice += "address of this machine that the cluster reaches"
        return examine(None, needs, Check("Spark", "problem", finding, advice), began_s)
    try:
        return examine(spark, needs, began_s=began_s)
    finally:
        begin(spark.stop, "sparkdl-doctor-stop").wait(_STOP_S)


def _start(options: argparse.Namespace) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("sparkdl doctor")
    builder = builder.remote(options.remote) if options.remote else builder.master(options.master)
    settings = dict(text.split("=", 1) for text in options.conf)
    for name, value in {**({} if options.remote else _SETTINGS), **settings}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def examine(
    spark: SparkSession | None,
    needs: Requirements,
    why_not: Check = _NO_SPARK,
    began_s: float | None = None,
) -> Report:
    """Make all checks; `why_not` is reported where there is no session."""
    began_s = time.monotonic() if began_s is None else began_s
    checks = list(_check_driver(needs, why_not) if spark is None else _check_cluster(spark, needs))
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


def _check_driver(needs: Requirements, why_not: Check) -> Iterator[Check]:
    yield why_not
    urls = [absolute_url(path, "file://", os.getcwd()) for path in needs.paths]
    looked = look_around(needs.looks(urls), needs.limit_s)
    driver = msgspec.convert({**probe.basics(), **looked}, Facts)
    yield from _guarded("versions", judges.judge_versions, driver, [])
    yield from _guarded("package", judges.judge_packages, [driver])
    yield from _judge_facts([driver], needs, urls, "")


def _check_cluster(spark: SparkSession, needs: Requirements) -> Iterator[Check]:
    """Check a session's cluster: first all that needs no launch, then by a launch."""
    from sparkdl.driver.executors.sessions import default_fs

    found: list[Check] = []
    root = default_fs(spark)
    there = "" if root == "file://" else f"{root}/"
    wanted = [absolute_url(path, root, os.getcwd()) for path in needs.paths]
    urls = list(dict.fromkeys([*filter(None, [there]), *wanted]))
    for check in _before_launch(spark, needs):
        found.append(check)
        yield check
    # A launch that must fail would only repeat these problems, after its whole timeout.
    if any(each.verdict == "problem" and each.name in _FATAL for each in found):
        yield Check("launch", "skipped", "a launch would fail: see the problems above")
    else:
        yield from _guarded("launch", _launch, spark, needs, urls, there)


def _before_launch(spark: SparkSession, needs: Requirements) -> Iterator[Check]:
    driver = msgspec.convert(probe.basics(), Facts)
    yield from _guarded("package", judges.judge_packages, [driver])
    yield from _guarded("Spark", _judge_spark, spark, driver)
    topology, tasks = None, needs.nodes or 1
    try:
        topology = read_topology(spark, needs.spec(tasks))
    except SparkdlError as error:
        yield Check.of_error("slots", error)
    else:
        yield from _guarded("slots", _judge_slots, spark, needs, topology)
        if topology is not None:  # with dynamic allocation Spark is asked for executors
            tasks = max(topology.slots, tasks if topology.is_dynamic else 1)
    yield from _guarded(
        "executors", _judge_way, spark, min(_MOST_TASKS, tasks), needs.limit_s, driver
    )


def _judge_spark(spark: SparkSession, driver: Facts) -> Check:
    master = "" if context_of(spark) is None else spark.conf.get("spark.master", "a master")
    return judges.judge_spark(driver, spark.version, str(master))


def _judge_slots(spark: SparkSession, needs: Requirements, topology: Topology | None) -> Check:
    """Place the nodes as a launch would."""
    plan = placement_of(spark, needs.spec(_nodes(needs, topology)), topology)
    keeps = "keep their slots" if plan.is_attached else "give their slots back once they run"
    return Check("slots", "ok", f"{plan.why}; nodes {keeps}")


def _nodes(needs: Requirements, topology: Topology | None) -> int:
    return needs.nodes or max(1, len(topology.cores) if topology else 1)


def _judge_way(spark: SparkSession, tasks: int, limit_s: float, driver: Facts) -> Iterator[Check]:
    from sparkdl.driver.executors.sessions import driver_host

    address = ("", 0)
    with ExitStack() as stack:
        try:
            environment = Environment.read()
            host = environment.driver_host or driver_host(spark)
            ports = environment.driver_ports
            sock = listening_socket(host, ports, "the coordinator", "SPARKDL_DRIVER")
            address = (host, stack.enter_context(sock).getsockname()[1])
        except SparkdlError as error:
            yield Check.of_error("driver address", error)
        try:
            facts = _ask(spark, tasks, address, limit_s)
        except SparkdlError as error:
            yield Check.of_error("executors", error)
            return
        except Exception as error:  # noqa: BLE001 (Spark's, of several kinds)
            yield Check.of_error("Spark job", explain_job_failure(error))
            return
    yield from judges.judge_way(facts, host_port(*address) if address[0] else "")
    yield from judges.judge_versions(driver, facts, context_of(spark) is None)
    here = (driver.host, driver.package)  # is judged already
    yield from judges.judge_packages([one for one in facts if (one.host, one.package) != here])


def _ask(spark: SparkSession, tasks: int, address: tuple[str, int], limit_s: float) -> list[Facts]:
    """Run `probe.run_probe` in as many tasks as slots; return one answer of each executor."""
    from sparkdl.driver.executors.sessions import inheriting_thread, pickle_by_value

    pickle_by_value(probe)  # an executor may lack sparkdl, or have another one
    tag = f"sparkdl-doctor-{secrets.token_hex(4)}"

    def ask() -> list[Facts]:
        with (
            tagged_jobs(spark, tag),
            named_jobs(spark, "sparkdl doctor", "check that executors reach the driver"),
        ):
            frame = spark.range(tasks, numPartitions=tasks)
            rows = frame.mapInArrow(partial(probe.run_probe, *address), "facts string").collect()
        return [msgspec.convert(json.loads(row.facts), Facts) for row in rows]

    asked = begin(ask, tag, partial(inheriting_thread, spark))
    try:
        if asked.wait(limit_s):
            return [*{each.executor: each for each in asked.result()}.values()]
    finally:
        if not asked.done():  # the time is over, or the wait was interrupted
            with suppress(Exception):  # Spark is gone, perhaps
                cancel_jobs(spark, tag)
    raise ReservationTimeoutError(
        f"a job of {count(tasks, 'task')} did not finish within {limit_s:g} s. End other jobs of "
        "the application, and look in the Spark UI for executors that do not start or answer"
    )


def _launch(
    spark: SparkSession, needs: Requirements, urls: list[str], root: str
) -> Iterator[Check]:
    """Launch plain nodes that look around them and exchange a tensor; judge what they find."""
    nodes = _nodes(needs, read_topology(spark, needs.spec(1)))
    began_s = time.monotonic()
    try:
        with launch(
            spark,
            _node,
            {"looks": needs.looks(urls), "limit_s": needs.limit_s},
            nodes=nodes,
            framework="plain",
            num_gpus=needs.num_gpus,
            recovery=Recovery(hang_timeout_s=None),
            feeding=Feeding(fed=False),
            observe=Observe(progress=False, dashboard=False, on_log=lambda line: None),
            startup=Startup(timeout_s=START_S, tls=needs.tls),
        ) as cluster:
            text = f"{count(nodes, 'plain node')} started in {time.monotonic() - began_s:.1f} s"
            yield Check("launch", "ok", text)
            answers = cluster.results(needs.limit_s + 2 * START_S)
    except (SparkdlError, TimeoutError) as error:
        yield Check.of_error("launch", error)
        return
    yield judges.judge_exchange(_EXCHANGED_NBYTES, [answer["exchange"] for answer in answers])
    facts = [msgspec.convert(answer["facts"], Facts) for answer in answers]
    yield from _judge_facts(facts, needs, urls, root)


def _judge_facts(
    facts: Sequence[Facts], needs: Requirements, urls: list[str], there: str
) -> Iterator[Check]:
    if needs.framework != "plain":
        yield from _guarded("frameworks", judges.judge_imports, facts, needs.wanted)
    yield from _guarded("GPUs", judges.judge_gpus, facts, needs.num_gpus)
    needs_shm = needs.framework in (None, "torch")
    yield from _guarded("executor's Python", judges.judge_machines, facts, needs_shm)
    yield from _guarded("paths", judges.judge_storage, facts, urls, there)


def _node(args: dict[str, Any], ctx: NodeContext) -> dict[str, Any]:
    found = look_around(args["looks"], args["limit_s"])
    facts = {**probe.basics(), **found, "address": ctx.member.host}
    ctx.barrier(args["limit_s"] + START_S)  # the slowest may have looked so much longer
    return {"facts": facts, "exchange": _exchange(ctx) if ctx.num_workers > 1 else ""}


def _exchange(ctx: NodeContext) -> float | str:
    """Return the seconds of one all-reduce between the nodes, or why there is none."""
    from sparkdl.collectives.group import connect
    from sparkdl.collectives.transport import Op, Reduction

    try:
        group = connect(ctx.rank, ctx.num_workers, ctx.all_gather, ctx.member.host, START_S)
    except FrameworkMissingError as error:
        return str(error)
    try:
        import torch

        numbers, total = torch.ones(_EXCHANGED_NBYTES // 4), Reduction(Op.SUM)
        # The first one connects and allocates, so it is not timed.
        group.all_reduce_(numbers, total)
        began_s = time.monotonic()
        group.all_reduce_(numbers, total)
        return time.monotonic() - began_s
    finally:
        group.close()
