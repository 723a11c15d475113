"""The user's handle on a running cluster."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sparkdl.control.messages import BoardStarted, NodeActive
from sparkdl.control.tls import Tls
from sparkdl.control.values import decode_value
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, ResultError, ShutdownTimeoutError
from sparkdl.core.spec import DEFAULT_FEED, ClusterSpec
from sparkdl.core.texts import listed
from sparkdl.core.world import World, host_port
from sparkdl.driver.controller import Controller
from sparkdl.driver.ending import Ending, ends_if_interrupted
from sparkdl.driver.executors.executor import Executor
from sparkdl.driver.feeds.coverage import FeedRequest
from sparkdl.driver.feeds.feeds import Feeds
from sparkdl.driver.feeds.report import FeedReport
from sparkdl.driver.feeds.runner import StallWarning
from sparkdl.driver.lifecycle.state import before_stop, failure_of, has_ended, is_empty, status_of
from sparkdl.driver.threads import begin

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

_FETCH_S = 5.0
_LOOK_S = 1.0


class Cluster:
    """A running cluster. Made by `sparkdl.launch`; use it as a context manager.

    All methods may be called from any thread. Leaving the `with` block shuts the cluster down:
    in order after the block's end, at once after an exception.

    Attributes:
        dashboard_url: of the cluster's pages; `None` without a dashboard. Anyone who has this URL
            can open them.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        controller: Controller,
        executor: Executor,
        token: str,
        world: World,
        show_progress: bool | None,
        ending: Ending,
    ) -> None:
        self.spec = spec
        self.dashboard_url: str | None = None
        self.ending = ending
        self._world = world
        self._controller = controller
        self._executor = executor
        self._show_progress = show_progress
        self._feeds = Feeds(controller, executor, token, lambda: self.world)
        ending.first = self._feeds.close

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.shutdown()
        else:
            self.abort()

    def __repr__(self) -> str:
        nodes = listed([member.node.name for member in self.world.members])
        return f"Cluster({self.spec.cluster_id}: {nodes}; {self.status()})"

    @property
    def world(self) -> World:
        """The nodes of this generation, or of the last one, with their addresses."""
        now = self._controller.look(lambda view: getattr(before_stop(view.state), "world", None))
        return now or self._world

    @property
    def server_address(self) -> tuple[str, int]:
        """Host and port of the coordinator, to which the nodes' agents are connected."""
        address = self._controller.server.address
        assert address is not None
        return address.host, address.port

    @property
    def tls(self) -> Tls | None:
        """The certificates of this cluster's servers and clients; `None` without TLS."""
        return self._controller.server.tls

    @property
    def board(self) -> BoardStarted | None:
        """Port and process id of the TensorBoard that runs beside the first node, if one does."""
        board = self._controller.look(lambda view: view.tensorboard)
        is_gone = self.ending.is_asked or self._controller.look(lambda view: is_empty(view.state))
        return board if board and board.port and not is_gone else None

    def tensorboard_url(self) -> str | None:
        """Return TensorBoard's URL; `None` without it (`Observe(tensorboard=True)`)."""
        board, host = self.board, self.world.members[0].host
        return None if board is None else f"http://{host_port(host, board.port)}"

    def status(self) -> str:
        """Return the state: Gathering, Running, Failed, Finished, Stopping or Stopped.

        After a restart it says so: `Running (restart 1 because …)`.
        """
        return self._controller.look(lambda view: status_of(view.state))

    @ends_if_interrupted  # outermost: a traceback begins there
    def feed(
        self,
        data: Any,
        epochs: int = 1,
        feed: str = DEFAULT_FEED,
        timeout_s: float | None = None,
        role: str | None = None,
        reader: str = "auto",
        shuffle: str | None = None,
        seed: int = 0,
    ) -> FeedReport:
        """Stream `data` into the training `epochs` times; blocks until the nodes have read it.

        The data passes through Spark once if it fits into the nodes' memory and disk, see
        `Feeding`; later epochs are read from there. A DataFrame that is a mere scan of Parquet
        files does not pass through Spark: the nodes read its files, see `reader`. The call also
        returns when a node has called `terminate()` or no node needs more; it may be repeated.

        Args:
            data: a DataFrame, an RDD, or Parquet files, which the nodes read themselves: a path or
                pattern, a list of them, or a `sparkdl.parquet`. Or a table of this process, of
                pyarrow, pandas, Polars or Hugging Face; with `executor="local"` also rows.
            feed: its name; `ctx.batches(…, feed=…)` reads it.
            timeout_s: seconds without any row received or read before it is an error.
            role: of the nodes to feed, `evaluator` for example; by default those that train.
            reader: who reads a DataFrame that is a mere scan of Parquet files. With `auto` the
                nodes read local files if they would surely get the same rows as Spark; a log line
                gives the choice and the reason. With `nodes` they also read other storages, and it
                is an error if the rows might differ. With `spark` Spark reads.
            shuffle: `"global"` redistributes all rows over all nodes in each epoch, in blocks;
                `ctx.batches(shuffle=True)` mixes the rows within them. See docs/guide.md.
            seed: of that order with `Feeding(global_batch_size=…)`, where it is the same each time.

        Raises:
            ConfigError: if the cluster is not fed, or `data` cannot be fed or has no rows.
            ReadError: if a node cannot read a file.
            NodeFailedError: if a node failed meanwhile, with its own error as root cause.
            FeedTimeoutError: if no row was received or read for `timeout_s`.
            FeedClosedError: if the cluster has ended.
            KeyboardInterrupt: by Ctrl-C, which ends the cluster; in `wait`, `shutdown` as well.
        """
        request = FeedRequest(data, epochs, timeout_s, role, reader, shuffle, seed)
        return self._feeds.feed(feed, request, self._show_progress)

    def train_stream(
        self,
        data: DataFrame,
        feed: str = DEFAULT_FEED,
        timeout_s: float | None = None,
        role: str | None = None,
        *,
        checkpoint_location: str | None = None,
        trigger: str | Mapping[str, Any] | None = None,
        query_name: str | None = None,
    ) -> StreamingQuery:
        """Stream a streaming DataFrame into the training; returns at once. See docs/data.md.

        Each micro-batch is an epoch, so nodes loop `while ctx.has_epoch()`. The query stops when a
        node has called `terminate()`, all have returned or one has failed.

        Args:
            feed, role: see `feed`.
            timeout_s: fail when no row of a micro-batch has been received or read for this many
                seconds. Time without data does not count.
            checkpoint_location: where Spark keeps the offsets, to resume from.
            trigger: a processing time like `"10 seconds"`, or the argument of
                `DataStreamWriter.trigger` in a dict, `{"availableNow": True}` for example.
            query_name: of the query.

        Returns:
            Spark's `StreamingQuery`.

        Raises:
            ConfigError: if `data` is not such a DataFrame, or the session is of Spark Connect.
            NodeFailedError: if a node failed before.
        """
        query: StreamingQuery = self._feeds.train_stream(
            *(data, feed, timeout_s, role),
            checkpoint_location=checkpoint_location,
            trigger=trigger,
            query_name=query_name,
        )
        return query

    def feed_async(
        self,
        data: Any,
        epochs: int = 1,
        feed: str = DEFAULT_FEED,
        timeout_s: float | None = None,
        role: str | None = None,
        reader: str = "auto",
        shuffle: str | None = None,
        seed: int = 0,
    ) -> Future[FeedReport]:
        """Call `feed` in its own thread, beside other feeds.

        Example: validation data is there when an epoch of training ends:
        `cluster.feed_async(validation, epochs=3, feed="validation")`, then `cluster.feed(training,
        epochs=3)`.

        Returns:
            A future; its `result()` returns the report, or raises the errors of `feed`.
        """
        show = bool(self._show_progress)  # by default none: it would cross the bar of another feed
        request = FeedRequest(data, epochs, timeout_s, role, reader, shuffle, seed)
        work = partial(self._feeds.feed, feed, request, show)
        return begin(work, f"sparkdl-feed-{feed}", self._executor.thread)

    def infer(
        self,
        data: Any,
        feed: str = DEFAULT_FEED,
        schema: Any = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Send rows through `map_fun` and return its results, one per row, in order; lazy.

        `map_fun` reads with `ctx.get_data_feed(train_mode=False)` and answers with
        `batch_results`. For a DataFrame it returns the DataFrame, its columns untouched, with
        columns of results. If a node is lost, Spark repeats the tasks that have sent it rows.

        Args:
            data: a DataFrame or an RDD; with `executor="local"` what `feed` takes.
            schema: the results' columns, like `"prediction float"`, or a StructType; required for a
                DataFrame. A Row or dict fills them by name, a tuple or list by position.
            timeout_s: how long rows may wait in a node for their results.

        Returns:
            A DataFrame for a DataFrame, an RDD of results for an RDD. With `executor="local"` an
            iterator.

        Raises:
            ConfigError: if `schema` is missing for a DataFrame, given for other data, or cannot
                work, or two columns would have one name.
        """
        return self._executor.infer(data, self._feeds.feed_spec(feed, timeout_s), schema)

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """End the feeds, wait for every `map_fun` to return, and return their values by rank.

        The value of nodes that do not train (ps, evaluator) is `None`.

        Raises:
            NodeFailedError: if a node failed.
            ResultError: if a value cannot travel; this call then returns none of the others.
            TimeoutError: after `timeout_s`; the cluster continues.
        """
        self.end_feeds()
        self.wait(timeout_s)
        returned = self._controller.look(lambda view: before_stop(view.state).returned)
        values = []
        for member in self.world.members:
            message = returned.get(member.node.node_id)
            if message is not None and message.result_problem:
                raise ResultError(
                    f"{member.node.name} (rank {member.rank}): {message.result_problem}"
                )
            values.append(decode_value(message.result) if message else None)
        return values

    @ends_if_interrupted
    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until `map_fun` has returned on every node that trains.

        Raises:
            NodeFailedError: if a node failed.
            ResultError: if the cluster was stopped first.
            TimeoutError: after `timeout_s`; the cluster continues.
        """
        deadline = Deadline.after(timeout_s)
        stall = StallWarning(self._controller)
        while not self._controller.wait_for(
            lambda view: has_ended(view.state), Deadline.after(min(_LOOK_S, deadline.remaining_s))
        ):
            if deadline.has_passed:
                names = self._still_running()
                raise TimeoutError(f"{names} still in map_fun after {timeout_s:g} s")
            stall.look()
        self._raise_failure()
        if running := self._still_running():
            raise ResultError(f"the cluster was stopped before {running} had returned")

    def end_feeds(self, feed: str | None = None) -> None:
        """End one feed or all: stop streams, and notify the nodes that no more rows follow.

        After a restart it waits until the rows that no checkpoint covers have been fed again.

        Raises:
            SparkdlError: if that failed.
        """
        self._feeds.end(feed)
        self._feeds.raise_problem()

    def reported(self, after: int = -1, timeout_s: float = 0.0) -> tuple[int, dict[str, float]]:
        """Return the step and metrics of rank 0's last `ctx.report`; step -1 if there is none.

        Waits for a step beyond `after`: for `timeout_s`, or until `map_fun` has returned.
        """
        node_id = self._world.members[0].node.node_id
        none = NodeActive(0)
        self._controller.wait_for(
            lambda view: view.activity.get(node_id, none).step > after or has_ended(view.state),
            Deadline.after(timeout_s),
        )
        last = self._controller.look(lambda view: view.activity.get(node_id, none))
        return last.step, last.numbers

    def logs(self, rank: int, lines: int = 100) -> list[str]:
        """Return the last lines that a node has printed, also after it has ended.

        Lines from before a restart, or of a node that was lost with its agent, are available only
        to `Observe(on_log=…)`.

        Args:
            rank: the node's rank in `world`.
        """
        if not 0 <= rank < self.world.size:
            raise ConfigError(f"rank={rank}: must be at least 0 and at most {self.world.size - 1}")
        node_id = self.world.members[rank].node.node_id
        return list(self._controller.fetch_log(node_id, lines, Deadline.after(_FETCH_S)))

    def stacks(self) -> dict[str, str]:
        """Return the current Python stacks of all threads of each node, by node name.

        Innermost call first, as `faulthandler` writes them, even where a node hangs in C code and
        holds the GIL. For a node that does not answer, the text is the state of its process.
        """
        return self._controller.fetch_stacks(Deadline.after(_FETCH_S))

    @ends_if_interrupted
    def shutdown(self, timeout_s: float | None = None) -> None:
        """End the feeds, wait for `map_fun` to return everywhere, and end all nodes.

        A second call does nothing. The SparkContext and other jobs are left alone.

        Args:
            timeout_s: how long `map_fun` may take before it is stopped; no limit by default.

        Raises:
            NodeFailedError: if a node failed, at any time.
            ShutdownTimeoutError: if `map_fun` had to be stopped.
            ResultError: if another thread has aborted the cluster meanwhile.
        """
        if not self.ending.is_wanted():
            self.ending.wait()
            return
        deadline = Deadline.after(timeout_s)
        self._feeds.end(timeout_s=timeout_s)
        in_time = self._controller.wait_for(lambda view: has_ended(view.state), deadline)
        running = self._still_running()
        self.ending.ask(self.spec.settings.grace_s)
        self.ending.wait()
        self._raise_failure()
        self._feeds.raise_problem()
        if not in_time:
            raise ShutdownTimeoutError(
                f"{running} had not returned from map_fun after {timeout_s:g} s and was stopped. "
                "If it needs longer, for example to export a model, raise timeout_s of shutdown "
                "(in TFCluster: timeout)"
            )
        if running:
            raise ResultError(f"the cluster was aborted before {running} had returned")

    def abort(self) -> None:
        """End all nodes at once, even while other calls wait. Never raises nodes' failures."""
        self.ending.ask(0.0)
        self.ending.wait()

    def _still_running(self) -> str:
        returned = self._controller.look(
            lambda view: getattr(before_stop(view.state), "returned", {})
        )
        names = [
            member.node.name
            for member in self.world.members
            if member.role.finishes_job and member.node.node_id not in returned
        ]
        return listed(names)

    def _raise_failure(self) -> None:
        error = self._controller.look(lambda view: failure_of(view.state))
        if error is not None:
            raise error
