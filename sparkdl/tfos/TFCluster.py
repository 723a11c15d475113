"""TensorFlowOnSpark's `TFCluster`: `run`, and the cluster with `train`, `inference`, `shutdown`.

Runs in: driver

It translates arguments and calls `sparkdl.driver`; of a DStream it feeds each RDD as it comes.
https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/TFCluster.py
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.jobs import named_jobs
from sparkdl.core.options import Feeding, Roles, Startup
from sparkdl.core.spec import DEFAULT_FEED
from sparkdl.driver.executors.sessions import active_session
from sparkdl.driver.feeds.report import FeedReport
from sparkdl.driver.handle import Cluster
from sparkdl.driver.launch import launch
from sparkdl.driver.options import Observe
from sparkdl.tfos.reservation import TOKEN_VARIABLE, Server
from sparkdl.tfos.util import num_gpus

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

__all__ = ["InputMode", "TFCluster", "run"]

DEFAULT_QUEUES = ("input", "output", "error")
DEFAULT_EPOCHS = 10
"""The epochs that `num_epochs=0` stands for, as in TensorFlowOnSpark."""
_TURN_S = 1.0


class InputMode(IntEnum):
    """How the nodes get their data. The numbers are TensorFlowOnSpark's."""

    TENSORFLOW = 0
    """`map_fun` reads its own data."""
    SPARK = 1
    """Spark tasks feed `map_fun`."""


class TFCluster:
    """A running cluster.

    Attributes:
        cluster: the `sparkdl.Cluster` behind it.
        sc: the SparkContext or session that `run` was given.
        input_mode: how the nodes get their data.
        queues: the names that `train` accepts.
        cluster_meta: what the cluster was made of: `id`, `cluster_template` (executor ids by role),
            `num_executors`, `default_fs`, `working_dir`, `server_addr` (of `server`),
            `release_port`. `meta` is the same.
        defaultFS, working_dir, num_executors, cluster_id: of it, one by one.
        server: a `reservation.Client` asks it for the nodes, or to end a stream.
    """

    def __init__(self, sc: Any, cluster: Cluster, queues: Sequence[str]) -> None:
        spec = cluster.spec
        self.sc = sc
        self.cluster = cluster
        self.input_mode = InputMode(spec.is_fed)
        self.queues = list(queues)
        self.server = Server(len(spec.nodes))
        self.defaultFS = spec.default_fs
        self.working_dir = spec.working_dir
        self.num_executors = len(spec.nodes)
        self.cluster_id = int(spec.cluster_id, 16)
        template: dict[str, list[int]] = {}
        for node in spec.nodes:
            template.setdefault(node.role.name, []).append(node.node_id)
        self.cluster_meta: dict[str, Any] = {
            "id": self.cluster_id,
            "cluster_template": template,
            "num_executors": self.num_executors,
            "default_fs": self.defaultFS,
            "working_dir": self.working_dir,
            "server_addr": self.server.start(beside=cluster.server_address[0]),
            "release_port": spec.release_port,
        }
        self.meta = self.cluster_meta
        self._streams: list[DStreamFeed] = []
        for info in self.cluster_info:
            self.server.reservations.add(info)

    @property
    def cluster_info(self) -> list[dict[str, Any]]:
        """A dict for each node, by executor id.

        `addr` is where its rows are received; `authkey` is empty: no key is handed out.
        """
        board = self.cluster.board
        return [
            {
                "executor_id": member.node.node_id,
                "host": member.host,
                "job_name": member.role.name,
                "task_index": member.index,
                "port": member.port,
                "tb_pid": board.pid if board and member.rank == 0 else 0,
                "tb_port": board.port if board and member.rank == 0 else 0,
                "addr": member.data_address,
                "authkey": b"",
            }
            for member in sorted(self.cluster.world.members, key=lambda m: m.node.node_id)
        ]

    def train(
        self,
        dataRDD: Any,
        num_epochs: int = 0,
        feed_timeout: float = 600,
        qname: str = DEFAULT_FEED,
    ) -> FeedReport | None:
        """Feed an RDD or a DataFrame into the training; blocks until the nodes have read it.

        Args:
            dataRDD: an RDD, a DataFrame, or Parquet files, see `sparkdl.Cluster.feed`. Each RDD of
                a DStream is fed as it comes: the call returns at once, and `shutdown(ssc)` waits.
            num_epochs: how many times; 0 means 10, as in TensorFlowOnSpark. A DStream is fed once.
            feed_timeout: seconds without any row received or read.

        Returns:
            A report on the rows; `None` for a DStream.

        Raises:
            ConfigError: without `InputMode.SPARK`, with an unknown `qname` or negative epochs.
            NodeFailedError: if a node failed.
            FeedTimeoutError: if no row was received or read for `feed_timeout` seconds.
        """
        self._check_feed(qname)
        if num_epochs < 0:
            raise ConfigError(f"num_epochs={num_epochs} must be 0 or more")
        if hasattr(type(dataRDD), "foreachRDD"):  # any name is a column of a DataFrame, perhaps
            self._train_dstream(dataRDD, qname, feed_timeout)
            return None
        return self.cluster.feed(dataRDD, num_epochs or DEFAULT_EPOCHS, qname, feed_timeout)

    def inference(self, dataRDD: Any, feed_timeout: float = 600, qname: str = DEFAULT_FEED) -> Any:
        """Return an RDD with one result per row of an RDD, in order.

        Nothing runs until an action. `cluster.cluster.infer` returns a DataFrame.
        """
        self._check_feed(qname)
        return self.cluster.infer(dataRDD, qname, timeout_s=feed_timeout)

    def shutdown(self, ssc: Any = None, grace_secs: float = 0, timeout: float = 259200) -> None:
        """End the feed, wait for `map_fun` to return, end the nodes. A second call does nothing.

        Args:
            ssc: a StreamingContext whose end is waited for first, without a limit. It is ended
                when a node has called `terminate()`, all have returned or one has failed, or a
                client has asked `server` to stop; its SparkContext stays.
            grace_secs: accepted, without effect. TensorFlowOnSpark sleeps so long after the
                training, so that `map_fun` can still export a model; here the call waits until
                `map_fun` has returned.
            timeout: seconds until `map_fun` must have returned everywhere; 0 or below for no limit.

        Raises:
            NodeFailedError: if a node failed.
            ShutdownTimeoutError: if `map_fun` had not returned in time and was stopped.
        """
        try:
            if ssc is not None:
                await_end(ssc, self.server, self._streams)
        except KeyboardInterrupt:
            self.cluster.ending.ask(0.0)  # before anything that another interrupt could come into
            self.cluster.abort()
            raise
        finally:
            self.server.stop()
            self.cluster.shutdown(timeout if timeout > 0 else None)

    def tensorboard_url(self) -> str | None:
        """Return where TensorBoard answers; `None` if it was not asked for."""
        return self.cluster.tensorboard_url()

    def __enter__(self) -> TFCluster:
        return self

    def __exit__(self, *error: Any) -> None:
        self.server.stop()
        self.cluster.__exit__(*error)

    def _check_feed(self, qname: str) -> None:
        if self.input_mode is not InputMode.SPARK:
            raise ConfigError(
                "train and inference need TFCluster.run(…, input_mode=InputMode.SPARK)"
            )
        if qname not in self.queues or qname == "error":
            raise ConfigError(f"qname={qname!r} is not one of queues={self.queues}")

    def _train_dstream(self, dstream: Any, qname: str, feed_timeout: float) -> None:
        feed = next((feed for feed in self._streams if feed.qname == qname), None)
        if feed is None:
            feed = DStreamFeed(self.cluster, qname, feed_timeout)
            self._streams.append(feed)
            # The program's operator needs it, and warnings alone are seen without logging.
            _log.warning(
                "The stream continues until a node calls terminate(), or a client asks the server "
                "at %s:%d to stop it: python -m sparkdl.tfos.reservation %s %d. The client needs "
                "the token, so start both programs with the same secret in %s",
                *(*self.cluster_meta["server_addr"] * 2, TOKEN_VARIABLE),
            )
        dstream.foreachRDD(lambda rdd: feed.feed(rdd))  # pyspark counts a function's arguments


def run(
    sc: SparkContext | SparkSession | None,
    map_fun: Callable[[Any, Any], Any],
    tf_args: Any,
    num_executors: int,
    num_ps: int = 0,
    tensorboard: bool = False,
    input_mode: InputMode = InputMode.TENSORFLOW,
    log_dir: str | None = None,
    driver_ps_nodes: bool = False,
    master_node: str | None = None,
    reservation_timeout: float = 600,
    queues: Sequence[str] = DEFAULT_QUEUES,
    eval_node: bool = False,
    release_port: bool = True,
    **options: Any,
) -> TFCluster:
    """Start `map_fun(tf_args, ctx)` on `num_executors` nodes and return once all know each other.

    Args:
        sc: the SparkContext or session; over Spark Connect the session. `None` for the active one.
        tf_args: anything picklable; a list becomes `sys.argv` in the nodes; `num_gpus` is read
            from a namespace or dict.
        num_executors: nodes in all, ps and evaluator included.
        num_ps: parameter servers among them.
        tensorboard: whether TensorBoard runs beside the chief, or the first worker where there is
            none; see `tensorboard_url`. `TENSORBOARD_PORT` on the executors fixes its port.
        driver_ps_nodes: run these as processes of the driver's machine.
        input_mode: `InputMode.TENSORFLOW` or `InputMode.SPARK`.
        log_dir: what TensorBoard shows; by default `tensorboard_<executor id>` in the working
            directory of `map_fun`.
        master_node: name of the chief's role (`chief`, `master`), if there is to be one.
        reservation_timeout: seconds until all nodes must be there.
        queues: names of the feeds.
        eval_node: whether one node is an evaluator; needs `InputMode.TENSORFLOW`.
        release_port: `False` to keep the port until `ctx.release_port()`.
        options: whatever else `sparkdl.launch` takes: `max_restarts`, `checkpoint_dir`, `recovery`
            and so on.

    Raises:
        ConfigError: if an option is invalid or the cluster lacks room; nothing was started.
        FrameworkMissingError: if the executors lack TensorFlow, or TensorBoard if asked for.
    """
    input_mode = InputMode(input_mode)
    if eval_node and input_mode is InputMode.SPARK:
        raise ConfigError("eval_node=True needs input_mode=InputMode.TENSORFLOW")
    cluster = launch(
        sc,
        map_fun,
        tf_args,
        num_executors,
        **{
            "num_gpus": num_gpus(tf_args),
            **options,
            "roles": replace(
                options.get("roles", Roles()),
                ps=num_ps,
                ps_on_driver=driver_ps_nodes,
                chief=master_node,
                evaluator=eval_node,
            ),
            "feeding": replace(options.get("feeding", Feeding()), fed=bool(input_mode)),
            "observe": replace(
                options.get("observe", Observe()),
                tensorboard=(log_dir or True) if tensorboard else False,
            ),
            "startup": replace(
                options.get("startup", Startup()),
                timeout_s=reservation_timeout,
                release_port=release_port,
            ),
        },
    )
    try:
        return TFCluster(active_session() if sc is None else sc, cluster, queues)
    except BaseException:
        # The nodes run already, and without this nobody could end them.
        cluster.abort()
        raise


_log = logging.getLogger(__name__)


class DStreamFeed:
    """Feeds the RDDs of DStreams to one queue."""

    def __init__(self, cluster: Cluster, qname: str, feed_timeout: float) -> None:
        self.qname, self._feed_timeout = qname, feed_timeout
        self._feeds = cluster._feeds
        self.is_wanted = self._feeds.wants_more(qname)
        self.has_ended = threading.Event()
        self.error: Exception | None = None

    def feed(self, rdd: Any) -> None:
        """Feed one RDD unless the feed has ended; `shutdown(ssc)` raises its error."""
        if self.has_ended.is_set() or not self.is_wanted():
            return
        with named_jobs(rdd.context, "sparkdl", "stream, first rows"):
            # A DStream has an RDD for each interval, whether rows came or not.
            is_empty = rdd.isEmpty()
        if is_empty:
            return
        try:
            self._feeds.feed_micro_batch(self.qname, rdd, self._feed_timeout)
        except Exception as error:  # noqa: BLE001 (of a thread of pyspark; `shutdown` raises it)
            _log.exception("Feeding %r from a stream failed", self.qname)
            self.error = error
            self.has_ended.set()


def await_end(ssc: Any, server: Server, feeds: list[DStreamFeed]) -> None:
    """Wait until the streaming has ended; end it when no more rows are needed."""
    # In turns, because a node or a client may end the stream meanwhile.
    while not ssc.awaitTerminationOrTimeout(_TURN_S):
        if server.done or any(feed.has_ended.is_set() or not feed.is_wanted() for feed in feeds):
            for feed in feeds:
                # First, because a graceful stop still hands out the RDDs that have come.
                feed.has_ended.set()
            ssc.stop(stopSparkContext=False, stopGraceFully=True)
            break
    for feed in feeds:
        if feed.error is not None:
            raise feed.error
