"""`launch` and `run`: from what the user asks to a running cluster.

Runs in: driver
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from sparkdl.control.auth import new_token
from sparkdl.control.tls import Tls, TlsFiles, choose_tls
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, FrameworkMissingError, LaunchError
from sparkdl.core.paths import absolute_url
from sparkdl.core.settings import Environment, HangAction, Settings
from sparkdl.core.spec import ClusterSpec, InputMode, Placement, plan_nodes
from sparkdl.core.spelling import checks_keywords
from sparkdl.core.tracking import follower_of_launch
from sparkdl.driver.controller import Controller
from sparkdl.driver.dashboard import Dashboard, Recorder, dashboard_of_program
from sparkdl.driver.ending import Ending, is_interrupt
from sparkdl.driver.events import Ended, Logged, Report
from sparkdl.driver.executors.executor import Executor, Launch
from sparkdl.driver.feeds.runner import failure_behind, never_fed
from sparkdl.driver.handle import Cluster
from sparkdl.driver.health import HangWatch
from sparkdl.driver.lifecycle import state as states
from sparkdl.driver.lifecycle.state import failure_of, has_ended
from sparkdl.driver.log_files import LogFiles, check_folder
from sparkdl.driver.logs import LogLine, hand_on
from sparkdl.driver.payload import pickle_user_code
from sparkdl.driver.run_socket import answer_runs
from sparkdl.driver.show import has_audience, in_notebook, print_beside, printing
from sparkdl.driver.timeline import Timeline, check_file
from sparkdl.driver.warm import chosen_keep_s, warm_key
from sparkdl.frameworks.framework import framework_named

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession
    from typing_extensions import Unpack

    from sparkdl.driver.options import LaunchOptions
    from sparkdl.node.checkpoint_store import Found

_log = logging.getLogger(__name__)


_INPUT_MODES = {
    "spark": InputMode.SPARK,
    "tensorflow": InputMode.TENSORFLOW,
    "own": InputMode.TENSORFLOW,
}
_JOIN_MARGIN_S = 30.0
_TENSORBOARD_S = 150.0
MapFun = Callable[[Any, Any], Any]


@checks_keywords
def launch(  # noqa: PLR0913 (one option, one name)
    spark: SparkSession | SparkContext | None,
    map_fun: MapFun,
    args: Any = None,
    nodes: int = 1,
    *,
    framework: str = "tensorflow",
    input_mode: str | InputMode = "spark",
    num_ps: int = 0,
    master_node: str | None = None,
    eval_node: bool = False,
    coordinator: bool | None = None,
    driver_ps_nodes: bool = False,
    executor: Literal["spark", "local"] = "spark",
    placement: Placement = "auto",
    num_gpus: int | Mapping[str, int] | None = None,
    release_port: bool = True,
    tensorboard: bool | str = False,
    log_to_driver: bool | Callable[[LogLine], None] | None = None,
    log_dir: str | None = None,
    show_progress: bool | None = None,
    reservation_timeout: float = 600.0,
    feed_timeout: float = 600.0,
    feed_memory: int | None = None,
    feed_disk: int | None = None,
    max_restarts: int = 0,
    keep_warm_s: float | None = None,
    preload: Sequence[str] = (),
    min_nodes: int | None = None,
    elastic_timeout: float = 60.0,
    host_timeout: float = 8.0,
    checkpoint_dir: str | None = None,
    keep_checkpoints: int = 3,
    hang_timeout: float | None = 600.0,
    hang_action: HangAction = "report",
    independent_models: bool = False,
    on_report: Callable[[Report], None] | None = None,
    tls: bool | tuple[str, str, str] | TlsFiles | None = None,
    dashboard: bool | None = None,
    record: str | None = None,
    timeline: str | None = None,
) -> Cluster:
    """Start a cluster of `nodes` framework processes, each running `map_fun(args, ctx)`.

    Returns once all nodes know each other. Use the cluster as a context manager.

    Args:
        spark: the session (or context) whose executors carry the nodes; `None` for the active
            session, and with `executor="local"`.
        map_fun: called once in every node with `args` and its `NodeContext`.
        args: anything picklable; a list also becomes `sys.argv` in the nodes.
        nodes: how many in all, ps and evaluator included.
        framework: `tensorflow`, `torch`, `jax`, or `plain` for none.
        input_mode: `spark`: fed by `cluster.feed` and `infer`. `own`: `map_fun` reads its own
            data (`tensorflow` is TensorFlowOnSpark's name for that).
        num_ps: of the nodes, how many are parameter servers.
        master_node: name of the chief's role, if one of the nodes is to be a chief.
        eval_node: whether one of the nodes is an evaluator.
        coordinator: whether the chief alone runs `map_fun`, on servers that ps and workers run,
            see docs/parameter-servers.md; by default with TensorFlow and `num_ps`. `False` runs
            `map_fun` on all nodes.
        driver_ps_nodes: run the parameter servers on this machine, without slots of Spark.
        executor: `local` runs the nodes as processes of this machine, without Spark.
        placement: `attached`: nodes keep their task slots, unless a loss of executors leaves none
            for feeding. `detached`: they give them back to feeding tasks. `auto`: attached where
            slots are left over.
        num_gpus: GPUs for each node that trains, or a dict of them by role: `{"evaluator": 1}`. By
            default those that Spark assigned, or else one where a host has any; 0 for none. See
            docs/gpus.md.
        release_port: `False` to keep the framework's port reserved until `ctx.release_port()`.
        tensorboard: whether TensorBoard runs beside the first node, see `Cluster.tensorboard_url`;
            the directory or URL that it shows, by default `tensorboard_<node id>` where `map_fun`
            runs. With it the launch returns when it answers, and `map_fun` runs meanwhile.
        log_to_driver: print the nodes' output here, each line behind `[worker:1]`: of all nodes
            (`True`) or of none (`False`). By default that of rank 0, where a person reads it: the
            error stream is a terminal, or this is a notebook, or spark-submit runs the program in
            client mode. Lines that TensorFlow prints at every start are left out, unless the nodes'
            environment has `TF_CPP_MIN_LOG_LEVEL=0`; `Cluster.logs` has them in any case. A
            function is called with each line of all nodes, a `LogLine`, instead.
        log_dir: folder on the driver's machine in which all that the nodes print is kept, in
            `sparkdl-<cluster>/worker-0.log` and so on: the last 640 MiB of each node, in files of
            64 MiB. A full or slow disk costs lines, which the files tell of, and harms no node. See
            docs/failures.md.
        show_progress: progress bars; by default where the error stream is a terminal.
        reservation_timeout: seconds until all nodes must be there, from when it is the cluster's
            turn: clusters of one program wait for one another's slots, in the order of their
            launches. Before that, as many seconds for executors that are still to come.
        feed_timeout: seconds without any row received or read until feeding is an error; also those
            that a node waits for the first row of a feed.
        feed_memory: bytes of received rows that a node holds before feeders wait; by default
            an eighth of the memory.
        feed_disk: bytes on its executor's local disk in which a node keeps rows beyond that, if
            later epochs are to read them again; by default a quarter of what is free.
        max_restarts: how often all nodes begin anew after a failure, at the last checkpoint; see
            docs/failures.md.
        keep_warm_s: seconds for which the process that has imported the framework stays on each
            executor for the next launch of this program: without task slot, GPU or port. A launch
            of another framework or environment starts another one. By default 120 in a notebook,
            60 for a `fit` within a search, and else 0; the environment variable
            SPARKDL_KEEP_WARM_S replaces these. Linux only. See docs/failures.md.
        preload: names of modules that nodes import besides the framework, while they wait for one
            another; `["transformers"]`.
        min_nodes: with how many to continue if lost ones do not come back; by default all.
        elastic_timeout: seconds that a restart waits for lost nodes.
        host_timeout: seconds without an answer of its kernel after which a host counts as lost; a
            cut of the network that lasts longer than half of that may cost a restart.
        checkpoint_dir: path or URL of the folder of `ctx.checkpoint`, which all nodes reach. If
            there are checkpoints in it, the training resumes at the last one.
        keep_checkpoints: how many of them are kept.
        hang_timeout: seconds without a step, a row or an exit until the stacks of all nodes are
            logged; `None` for no watch.
        hang_action: what follows then: `report` nothing more, `restart` or `fail`.
        independent_models: whether nodes that train on shares of the same rows and exchange nothing
            are meant: each trains a model of its own then. Otherwise `fit` of Keras outside of a
            strategy is an error, and a loop that exchanges nothing is logged as a warning.
        on_report: called with what nodes tell by `ctx.report`, a `Report` with `node`, `rank`,
            `step` and `metrics`: of reports in quick succession the last one, a few times a second.
            It is called on a thread that the cluster needs, so it must be quick. See
            docs/tracking.md.
        tls: whether the connections of sparkdl are encrypted, with a certificate that is made for
            this cluster, or with your own: `sparkdl.TlsFiles(cert, key, ca)`, paths at driver and
            executors. By default where Spark encrypts its own. See docs/security.md.
        dashboard: whether pages in a browser show what the cluster does, see
            `Cluster.dashboard_url`; by default where the extra `dashboard` is installed. See
            docs/dashboard.md.
        record: folder in which a file of what happens is written: `sparkdl dashboard FOLDER` shows
            it again.
        timeline: file on the driver's machine for a trace of all nodes, that ui.perfetto.dev
            shows: launch phases, steps, waits for rows, collectives, checkpoints, failures.
            `trace.json`, or `trace.json.gz` for a smaller one. See docs/timeline.md.

    Raises:
        ConfigError: if it cannot work as asked; nothing was started.
        FrameworkMissingError: if the executors lack the framework, or TensorBoard if asked for.
        ReservationTimeoutError: if not all nodes, or the executors for them, came up in time.
        NodeFailedError: if a node failed before all had come up.
        CheckpointError: if the checkpoints in `checkpoint_dir` cannot be read.
        LaunchError: if Spark could not run the nodes, or TensorBoard does not answer.
    """
    if placement not in ("auto", "attached", "detached"):
        raise ConfigError(f"placement={placement!r}: choose 'auto', 'attached' or 'detached'")
    mode = _input_mode(input_mode)
    is_coordinated = _is_coordinated(coordinator, framework, num_ps)
    spec = ClusterSpec(
        cluster_id=secrets.token_hex(4),
        nodes=plan_nodes(nodes, num_ps, master_node, eval_node, is_coordinated),
        framework=framework,
        input_mode=mode,
        placement=placement,
        num_gpus=dict(num_gpus) if isinstance(num_gpus, Mapping) else num_gpus,
        release_port=release_port,
        prints=printing(log_to_driver),
        keeps_log=log_dir is not None,
        working_dir=os.getcwd(),
        tensorboard=(tensorboard if isinstance(tensorboard, str) else "") if tensorboard else None,
        driver_nodes=num_ps if driver_ps_nodes else 0,
        checkpoint_dir=checkpoint_dir,
        preload=_modules(preload),
        independent_models=independent_models,
        settings=Settings(
            reservation_timeout_s=reservation_timeout,
            feed_timeout_s=feed_timeout,
            feed_memory_nbytes=feed_memory,
            feed_disk_nbytes=feed_disk,
            max_restarts=max_restarts,
            keep_warm_s=chosen_keep_s(keep_warm_s, in_notebook, os.environ),
            min_nodes=min_nodes,
            elastic_timeout_s=elastic_timeout,
            host_timeout_s=host_timeout,
            keep_checkpoints=keep_checkpoints,
            hang_timeout_s=hang_timeout,
            hang_action=hang_action,
        ),
    )
    payload = pickle_user_code(map_fun, args)
    where, spec = _executor(executor, spark, spec)
    # Nobody else has to reach the driver of a local cluster.
    environment = Environment() if executor == "local" else Environment.read()
    chosen_tls = choose_tls(tls, where.encrypting_setting())
    host = environment.driver_host or where.driver_host()
    pages = dashboard_of_program(dashboard, host)
    shown = log_to_driver if callable(log_to_driver) else _print_line
    watch = _Watch(
        shown if spec.prints != "none" else None,
        _log_files(log_dir, spec.cluster_id) if log_dir is not None else None,
        pages,
        check_folder("record", record) if record is not None else None,
        check_file("timeline", timeline) if timeline is not None else None,
        follower_of_launch(),
        on_report,
    )
    spec = replace(spec, is_watched=watch.needs_load, is_traced=watch.timeline is not None)
    cluster = _start(spec, where, environment, payload, watch, show_progress, chosen_tls)
    if pages is not None:
        cluster.dashboard_url = pages.url
        _log.info("Cluster %s: its dashboard is at %s", spec.cluster_id, pages.url)
        if show_progress or (show_progress is None and has_audience()):
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
        options: as for `launch`; `input_mode` is `own` unless given.

    Raises:
        NodeFailedError: if a node failed; and whatever `launch` and `Cluster.results` raise.
    """
    options.setdefault("input_mode", "own")
    cluster = launch(spark, map_fun, args, nodes, **options)
    try:
        values = cluster.results(timeout_s)
        cluster.shutdown()
        return values
    except BaseException:
        cluster.ending.ask(0.0)
        cluster.ending.wait()
        raise


@dataclass(frozen=True)
class _Watch:
    """Who looks at a cluster, from before its first node has started.

    Attributes:
        tracker: what `follower_of_launch` returns.
    """

    on_log: Callable[[LogLine], None] | None = None
    files: LogFiles | None = None
    pages: Dashboard | None = None
    record: str | None = None
    timeline: str | None = None
    tracker: Any = None
    on_report: Callable[[Report], None] | None = None

    @property
    def needs_load(self) -> bool:
        """Whether somebody wants to know what nodes take of their machines."""
        return any(each is not None for each in (self.pages, self.record, self.tracker))

    def begin(self, controller: Controller) -> None:
        """Attach all subscribers, before the first node starts."""
        answer_runs(controller)
        if self.on_log is not None:
            controller.subscribe(partial(hand_on, self.on_log), Logged)
        if self.files is not None:
            controller.subscribe(self.files.take, Logged, Ended)
        if self.pages is not None or self.record is not None:
            Recorder(controller, self.record, self.pages).start()
        if self.timeline is not None:
            Timeline(controller, self.timeline).start()
        if self.tracker is not None:
            self.tracker.follow(controller)
        if self.on_report is not None:
            controller.subscribe(self.on_report, Report)


def _start(
    spec: ClusterSpec,
    where: Executor,
    environment: Environment,
    payload: bytes,
    watch: _Watch,
    show_progress: bool | None,
    tls: Tls | None = None,
) -> Cluster:
    token, ending = new_token(), Ending(spec.cluster_id, where)

    def start() -> Controller:
        where.wait_turn(ending.is_wanted)
        newest, resumed = _at_newest_checkpoint(spec)
        controller = Controller(
            newest,
            token,
            watch.files.tail if watch.files else lambda node, lines: (),
            where.relaunch,
            resumed.ref if resumed else None,
            *(ending.release, where.forget_task, where.leave_host, tls),
        )
        if resumed:
            controller.checkpoints.coverage.restore(resumed.manifest.feeds)
        ending.controller = controller
        watch.begin(controller)
        host = environment.driver_host or where.driver_host()
        address = controller.start(host, environment.driver_ports)
        if spec.settings.hang_timeout_s is not None:
            HangWatch(controller, spec.settings.hang_timeout_s).start()
        where.start(
            Launch(
                *(address.url, token, newest, payload),
                *(partial(failure_behind, controller), controller.is_lost),
                tls.to_send() if tls else None,
                warm_key(),
                partial(never_fed, controller),
            ),
            lambda problem: controller.submit(states.LaunchBroke(problem)),
            lambda standing: controller.submit(states.SlotsCounted(standing)),
        )
        return controller

    handled = sys.exc_info()[1]
    try:
        controller = ending.begin(start)
        world = _gather(controller, controller.spec)
        if spec.tensorboard is not None:
            _await_tensorboard(controller)
        return Cluster(controller.spec, controller, where, token, world, show_progress, ending)
    except BaseException as error:
        ending.ask(0.0)  # before anything that another interrupt could come into
        ending.wait()
        if is_interrupt(error, handled):
            raise KeyboardInterrupt("the launch was ended, and all nodes with it") from None
        raise


def _at_newest_checkpoint(spec: ClusterSpec) -> tuple[ClusterSpec, Found | None]:
    """Make the folder of the checkpoints absolute, and return the newest one in it.

    Raises:
        ConfigError: if it cannot be written.
        CheckpointError: if it cannot be read.
    """
    if spec.checkpoint_dir is None:
        return spec, None
    if not spec.checkpoint_dir:
        raise ConfigError("checkpoint_dir='': give a path or a URL, or None for no checkpoints")
    from sparkdl.node.checkpoint_store import open_store

    url = absolute_url(spec.checkpoint_dir, spec.default_fs, spec.working_dir)
    store = open_store(url)
    if store.check_writable():
        _log.info("checkpoint_dir=%s did not exist and was created", url)
    found = store.newest()
    if found is not None:
        _log.info("Cluster %s goes on at checkpoint %s", spec.cluster_id, found.ref.url)
    return replace(spec, checkpoint_dir=url), found


def _gather(controller: Controller, spec: ClusterSpec) -> Any:
    timeout_s = spec.settings.reservation_timeout_s + _JOIN_MARGIN_S
    if not controller.gather(Deadline.after(timeout_s)):
        raise LaunchError(f"the controller did not decide within {timeout_s:g} s")
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
        raise LaunchError(
            f"the first node did not say within {_TENSORBOARD_S:g} s how TensorBoard is"
        )
    if board is not None and board.problem:
        raise (FrameworkMissingError if board.is_missing else LaunchError)(board.problem)


def _executor(
    kind: str, spark: SparkSession | SparkContext | None, spec: ClusterSpec
) -> tuple[Executor, ClusterSpec]:
    if kind == "local":
        from sparkdl.driver.executors.local import LocalExecutor

        return LocalExecutor(), replace(spec, driver_nodes=0)
    if kind == "spark":
        from sparkdl.driver.executors.spark import place

        return place(spark, spec)
    raise ConfigError(f"executor={kind!r}: choose 'spark' or 'local'")


def _is_coordinated(coordinator: bool | None, framework: str, num_ps: int) -> bool:
    has_servers = framework_named(framework).has_servers
    if coordinator and not has_servers:
        raise ConfigError(
            f"coordinator=True: framework={framework!r} has no parameter servers; "
            "framework='tensorflow' has"
        )
    return num_ps > 0 and has_servers if coordinator is None else coordinator


def _input_mode(mode: str | InputMode) -> InputMode:
    if isinstance(mode, str):
        if mode.lower() not in _INPUT_MODES:
            raise ConfigError(f"input_mode={mode!r}: choose 'spark' or 'own'")
        return _INPUT_MODES[mode.lower()]
    return InputMode(mode)


def _modules(names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        return (names,)
    if not isinstance(names, Iterable):
        raise ConfigError(f"preload={names!r}: give names of modules, like ['transformers']")
    return tuple(names)


def _log_files(log_dir: str, cluster_id: str) -> LogFiles:
    files = LogFiles(os.path.join(check_folder("log_dir", log_dir), f"sparkdl-{cluster_id}"))
    _log.info("What the nodes of cluster %s print is kept in %s", cluster_id, files.folder)
    return files


def _print_line(line: LogLine) -> None:
    print_beside(f"[{line.node}] {line.text}")
