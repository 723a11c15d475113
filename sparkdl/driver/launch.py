"""`launch` and `run`: from the user's request to a running cluster."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from sparkdl.control.auth import new_token
from sparkdl.control.tls import Tls, choose_tls
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, FrameworkMissingError, LaunchError
from sparkdl.core.files import absolute_url
from sparkdl.core.options import Feeding, Recovery, Roles, Startup
from sparkdl.core.settings import Environment, Settings
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.tracking import follower_of_launch
from sparkdl.driver.controller import Controller
from sparkdl.driver.dashboard import Dashboard, Recorder, dashboard_of_program, folder_of_records
from sparkdl.driver.ending import Ending, is_interrupt
from sparkdl.driver.events import Logged, Report
from sparkdl.driver.executors.executor import Executor, Launch
from sparkdl.driver.feeds.runner import failure_behind
from sparkdl.driver.handle import Cluster
from sparkdl.driver.health import HangWatch
from sparkdl.driver.lifecycle import state as states
from sparkdl.driver.lifecycle.state import failure_of, has_ended
from sparkdl.driver.options import OBJECTS, LaunchOptions, LogLine, Observe, reads_own_data
from sparkdl.driver.payload import pickle_user_code
from sparkdl.driver.show import has_audience, print_beside, printing
from sparkdl.frameworks.framework import framework_named
from sparkdl.node.checkpoint_store import Found, open_store

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession
    from typing_extensions import Unpack

_log = logging.getLogger(__name__)


# The controller decides at the launch's own timeout. The margin only catches one that does not.
_JOIN_MARGIN_S = 30.0
# Longer than `START_S` of `node/tensorboard.py`, after which the node reports a problem itself.
_TENSORBOARD_S = 150.0
MapFun = Callable[[Any, Any], Any]


def launch(  # noqa: PLR0913 (one question, one name)
    spark: SparkSession | SparkContext | None,
    map_fun: MapFun,
    args: Any = None,
    nodes: int = 1,
    *,
    framework: str = "tensorflow",
    num_gpus: int | Mapping[str, int] | None = None,
    max_restarts: int = 0,
    checkpoint_dir: str | None = None,
    executor: Literal["spark", "local"] = "spark",
    roles: Roles = Roles(),
    recovery: Recovery = Recovery(),
    feeding: Feeding = Feeding(),
    observe: Observe = Observe(),
    startup: Startup = Startup(),
) -> Cluster:
    """Start a cluster of `nodes` framework processes, each running `map_fun(args, ctx)`.

    Returns once all nodes have started. Use the cluster as a context manager.

    Args:
        spark: the session (or context) whose executors carry the nodes; `None` for the active
            session, and with `executor="local"`.
        map_fun: called once in every node with `args` and its `NodeContext`.
        args: anything picklable; a list also becomes `sys.argv` in the nodes.
        nodes: how many in all, ps and evaluator included.
        framework: `tensorflow`, `torch`, `jax`, or `plain` for none.
        num_gpus: GPUs for each node that trains, or a dict of them by role: `{"evaluator": 1}`. By
            default the GPUs that Spark assigned, or else one if the host has any; 0 for none. See
            docs/deployment.md.
        max_restarts: how often all nodes restart after a failure; see docs/recovery.md.
        checkpoint_dir: path or URL of the folder of `ctx.checkpoint`, which all nodes reach. If
            there are checkpoints in it, the training resumes at the last one.
        executor: `local` runs the nodes as processes of this machine, without Spark.
        roles: of the nodes: parameter servers, a chief, an evaluator.
        recovery: how the cluster reacts to losses and hangs.
        feeding: how rows come to nodes; `Feeding(fed=False)` where `map_fun` reads its own data.
        observe: monitoring: dashboard, logs, reports, traces.
        startup: where nodes come up, and how: placement, imports, encryption.

    Raises:
        ConfigError: if an option is invalid or the cluster lacks room; nothing was started.
        FrameworkMissingError: if the executors lack the framework, or TensorBoard if asked for.
        ReservationTimeoutError: if not all nodes, or the executors for them, started in time.
        NodeFailedError: if a node failed before all had started.
        CheckpointError: if the checkpoints in `checkpoint_dir` cannot be read.
        LaunchError: if Spark could not run the nodes, or TensorBoard does not answer.
    """
    _check_objects(roles, recovery, feeding, observe, startup)
    board = observe.tensorboard
    spec = ClusterSpec(
        cluster_id=secrets.token_hex(4),
        nodes=plan_nodes(nodes, roles, _is_coordinated(roles, framework)),
        framework=framework,
        placement=startup.placement,
        num_gpus=dict(num_gpus) if isinstance(num_gpus, Mapping) else num_gpus,
        release_port=startup.release_port,
        prints=printing(observe),
        working_dir=os.getcwd(),
        tensorboard=(board if isinstance(board, str) else "") if board else None,
        driver_nodes=roles.ps if roles.ps_on_driver else 0,
        checkpoint_dir=checkpoint_dir,
        preload=tuple(startup.preload),
        independent_models=roles.independent_models,
        settings=Settings(
            start_timeout_s=startup.timeout_s,
            max_restarts=max_restarts,
            recovery=recovery,
            feeding=feeding,
        ),
    )
    # Before the executor: an error of the user's code needs neither Spark nor slots.
    payload = pickle_user_code(map_fun, args)
    where, spec = _executor(executor, spark, spec)
    # A local cluster's driver listens on this machine alone, whatever the environment says.
    environment = Environment() if executor == "local" else Environment.read()
    chosen_tls = choose_tls(startup.tls, where.encrypting_setting())
    host = environment.driver_host or where.driver_host()
    pages = dashboard_of_program(observe.dashboard, host)
    watch = _Watch(
        observe,
        pages,
        folder_of_records(observe.record) if observe.record is not None else None,
        follower_of_launch(),
    )
    # Nodes measure only what an observer wants.
    spec = replace(spec, is_watched=watch.needs_load)
    with where.gathering():
        cluster = _start(spec, where, environment, payload, watch, chosen_tls)
    if pages is not None:
        cluster.dashboard_url = pages.url
        _log.info("Cluster %s: the dashboard is at %s", spec.cluster_id, pages.url)
        if observe.progress or (observe.progress is None and has_audience()):
            print_beside(f"Dashboard: {pages.url}")
    return cluster


def run(
    spark: SparkSession | SparkContext | None,
    map_fun: MapFun,
    args: Any = None,
    nodes: int = 1,
    *,
    timeout_s: float | None = None,
    **options: Unpack[LaunchOptions],
) -> list[Any]:
    """Launch a cluster that reads its own data, wait, and return the values of `map_fun` by rank.

    Args:
        timeout_s: seconds until `map_fun` must have returned everywhere.
        options: as for `launch`.

    Raises:
        NodeFailedError: if a node failed; and the errors of `launch` and `Cluster.results`.
    """
    options["feeding"] = reads_own_data(options.get("feeding", Feeding()))
    cluster = launch(spark, map_fun, args, nodes, **options)
    try:
        values = cluster.results(timeout_s)
        cluster.shutdown()
        return values
    except BaseException:
        # Also after Ctrl-C: the nodes must not outlive the call that has launched them.
        cluster.ending.ask(0.0)
        cluster.ending.wait()
        raise


@dataclass(frozen=True)
class _Watch:
    """The observers of a cluster, attached before its first node starts."""

    asked: Observe
    pages: Dashboard | None
    record: str | None
    tracker: Any

    @property
    def needs_load(self) -> bool:
        """Whether an observer needs the nodes' use of CPU, memory and GPU."""
        return any(each is not None for each in (self.pages, self.record, self.tracker))

    def begin(self, controller: Controller) -> None:
        asked = self.asked
        if asked.on_log is not None:
            controller.events.subscribe(partial(hand_on, asked.on_log), Logged)
        if asked.log_to_driver or (asked.on_log is None and controller.spec.prints != "none"):
            show = partial(hand_on, lambda line: print_beside(f"[{line.node}] {line.text}"))
            controller.events.subscribe(show, Logged)
        folder = self.pages.folder if self.pages is not None else None
        if (folder := self.record or folder) is not None:
            recorder = Recorder(controller, folder)
            recorder.start()
            if self.pages is not None:
                self.pages.show(recorder.path)
        if self.tracker is not None:
            self.tracker.follow(controller)
        if asked.on_report is not None:
            controller.events.subscribe(asked.on_report, Report)


def _start(
    spec: ClusterSpec,
    where: Executor,
    environment: Environment,
    payload: bytes,
    watch: _Watch,
    tls: Tls | None,
) -> Cluster:
    token, ending = new_token(), Ending(spec.cluster_id, where)

    def start() -> Controller:
        newest, resumed = _at_newest_checkpoint(spec)
        controller = Controller(*(newest, token, where), resumed.ref if resumed else None, tls)
        if resumed:
            # Before any call of `feed`: its number decides which of its rows are covered.
            controller.checkpoints.coverage.restore(resumed.manifest.feeds)
        # Set before any node starts, so that an interrupted launch can end them all.
        ending.controller = controller
        watch.begin(controller)
        host = environment.driver_host or where.driver_host()
        address = controller.start(host, environment.driver_ports)
        if spec.settings.recovery.hang_timeout_s is not None:
            HangWatch(controller, spec.settings.recovery.hang_timeout_s).start()
        where.start(
            Launch(
                *(address.url, token, newest, payload),
                *(partial(failure_behind, controller), controller.is_lost),
                tls,
            ),
            lambda problem: controller.submit(states.LaunchFailed(problem)),
        )
        return controller

    # An interrupt that the caller is handling already did not come into this launch.
    handled = sys.exc_info()[1]
    try:
        controller = ending.begin(start)
        world = _gather(controller, controller.spec)
        if spec.tensorboard is not None:
            _await_tensorboard(controller)
        progress = watch.asked.progress
        return Cluster(controller.spec, controller, where, token, world, progress, ending)
    except BaseException as error:
        ending.ask(0.0)  # before anything that another interrupt could come into
        ending.wait()
        if is_interrupt(error, handled):
            raise KeyboardInterrupt("launch interrupted; all nodes were stopped") from None
        raise


def _at_newest_checkpoint(spec: ClusterSpec) -> tuple[ClusterSpec, Found | None]:
    """Make the folder of the checkpoints absolute, and return the newest one in it."""
    if spec.checkpoint_dir is None:
        return spec, None
    if not spec.checkpoint_dir:
        raise ConfigError("checkpoint_dir='': give a path or a URL, or None for no checkpoints")
    url = absolute_url(spec.checkpoint_dir, spec.default_fs, spec.working_dir)
    store = open_store(url)
    if store.check_writable():
        _log.info("checkpoint_dir=%s did not exist and was created", url)
    found = store.newest()
    if found is not None:
        _log.info("Cluster %s: training resumes at checkpoint %s", spec.cluster_id, found.ref.url)
    return replace(spec, checkpoint_dir=url), found


def _gather(controller: Controller, spec: ClusterSpec) -> Any:
    timeout_s = spec.settings.start_timeout_s + _JOIN_MARGIN_S
    if not controller.gather(Deadline.after(timeout_s)):
        raise LaunchError(f"the launch neither succeeded nor failed within {timeout_s:g} s")
    state = controller.look(lambda view: view.state)
    problem = failure_of(state)
    if problem is not None:
        raise problem
    return state.world  # type: ignore[union-attr]


def _await_tensorboard(controller: Controller) -> None:
    controller.wait_for(
        lambda view: view.tensorboard is not None or has_ended(view.state),
        Deadline.after(_TENSORBOARD_S),
    )
    board, state = controller.look(lambda view: (view.tensorboard, view.state))
    if board is None and not has_ended(state):
        raise LaunchError(f"TensorBoard did not start within {_TENSORBOARD_S:g} s")
    if board is not None and board.problem:
        raise (FrameworkMissingError if board.is_missing else LaunchError)(board.problem)


def _executor(
    kind: str, spark: SparkSession | SparkContext | None, spec: ClusterSpec
) -> tuple[Executor, ClusterSpec]:
    if kind == "local":
        from sparkdl.driver.executors.local import LocalExecutor

        # All nodes run on this machine, so none is set apart from Spark's tasks.
        return LocalExecutor(), replace(spec, driver_nodes=0)
    if kind == "spark":
        try:
            from sparkdl.driver.executors.spark import create_executor
        except ModuleNotFoundError as error:
            # If pyspark itself lacks a module, its own error says more.
            if error.name != "pyspark":
                raise
            raise FrameworkMissingError(
                "pyspark is not installed: pip install 'pyspark>=4.0', or 'pyspark-client>=4.0' "
                "for a client of Spark Connect"
            ) from None

        return create_executor(spark, spec)
    raise ConfigError(f"executor={kind!r}: choose 'spark' or 'local'")


def _check_objects(*given: object) -> None:
    for (name, kind), value in zip(OBJECTS.items(), given, strict=True):
        if not isinstance(value, kind):
            raise ConfigError(
                f"{name}={value!r} must be a sparkdl.{kind.__name__}: "
                f"{name}={kind.__name__}({', '.join(each.name for each in fields(kind))})"
            )


def _is_coordinated(roles: Roles, framework: str) -> bool:
    has_servers = framework_named(framework).has_servers
    if roles.coordinator and not has_servers:
        raise ConfigError(
            f"Roles(coordinator=True): framework={framework!r} has no parameter servers. Use "
            "framework='tensorflow', or leave coordinator out"
        )
    return roles.ps > 0 and has_servers if roles.coordinator is None else roles.coordinator


def hand_on(on_log: Callable[[LogLine], None], event: Logged) -> None:
    """Call `on_log` with each line that a node has printed."""
    for index, line in enumerate(event.printed.lines):
        on_log(LogLine(event.node, line, index in event.printed.errors))
