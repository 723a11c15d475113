"""A whole cluster without Spark: results, failures, logs, and every way in which it ends."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparkdl
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, NodeFailedError, ResultError, ShutdownTimeoutError
from sparkdl.core.options import Feeding
from sparkdl.driver.lifecycle.state import has_ended
from sparkdl.driver.options import Observe
from sparkdl.node.context import NodeContext
from tests.doubles.gates import Gate
from tests.doubles.map_funs import hang
from tests.doubles.nodes import SOON_S, all_gone, launch, processes, use_settings


def test_results_are_by_rank_and_may_hold_arrays_and_output_has_the_name_of_its_node(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def speak(args: float, ctx: NodeContext) -> Any:
        print(f"I am {ctx.rank}")
        print("unfinished", end="", file=sys.stderr)
        return {"weights": np.full((2, 3), args + ctx.rank, np.float32), "seen": (1, {2})}

    with launch(speak, 0.5, observe=Observe(log_to_driver=True)) as cluster:
        for rank, result in enumerate(cluster.results(SOON_S)):
            np.testing.assert_array_equal(result["weights"], np.full((2, 3), 0.5 + rank, "f4"))
            assert result["weights"].dtype == np.float32
            assert result["seen"] == (1, {2})
        assert cluster.status() == "Finished"
    assert len(cluster.results()) == 2, "they can still be asked for"
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("[worker:1]")] == [
        "[worker:1] I am 1",
        "[worker:1] unfinished",
    ]
    assert "[worker:0] I am 0" in lines


def test_root_cause_comes_first_with_all_that_is_known_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 fails by itself, rank 0 only when rank 1 has gone, by its clock an hour before."""
    use_settings(monkeypatch, settle_s=2.0)  # rank 0 is heard on a slow machine as well
    start, alive = Gate.at(tmp_path / "start"), Gate.at(tmp_path / "alive")

    def fail(args: None, ctx: NodeContext) -> None:
        if ctx.rank == 1:
            start.wait()
            print("about to divide")
            os.open(alive.path, os.O_WRONLY)  # until this process ends
            1 / 0  # noqa: B018
        behind_s = time.time() - 3600
        time.time = lambda: behind_s
        alive.wait()
        raise ConnectionError("the other worker is gone")

    began_s = time.time()
    with ExitStack() as stack:
        cluster = launch(fail)
        stack.callback(cluster.abort)
        them = processes()
        start.open()
        with pytest.raises(NodeFailedError) as caught:
            cluster.results(SOON_S)
        cause, consequence = caught.value.failures
        assert all(began_s <= f.time_s <= time.time() for f in (cause, consequence))
        assert (cause.node, cause.rank, cause.host) == ("worker:1", 1, "127.0.0.1")
        assert cause.pid == them["worker:1"].child.pid
        assert cause.kind == "exception"
        assert cause.exception_type == "builtins.ZeroDivisionError"
        assert "1 / 0" in cause.traceback
        assert cause.log_tail == ("about to divide",)
        assert consequence.exception_type == "builtins.ConnectionError"
        story = str(caught.value)
        assert story.startswith(f"worker:1 (rank 1, pid {cause.pid}) on 127.0.0.1 raised ")
        assert story.index("ZeroDivisionError") < story.index("then worker:0")
        assert "  | about to divide" in story
        assert story.count("ZeroDivisionError: division by zero") == 2, "headline and traceback"
        # The package's folder, because a checkout's may have the same name.
        assert str(Path(sparkdl.__file__).parent) not in story, "the frames are the user's"
        logs = [cluster.logs(rank) for rank in (0, 1)]
        assert logs[0][-1] == "ConnectionError: the other worker is gone", "logs outlive the child"
        assert logs[1][0] == "about to divide"
        assert logs[1][-1] == "ZeroDivisionError: division by zero"
        with pytest.raises(NodeFailedError):
            cluster.shutdown()
        assert [cluster.logs(rank) for rank in (0, 1)] == logs, "and the agents"
    assert all_gone([process for pair in them.values() for process in (pair.agent, pair.child)])


@pytest.mark.parametrize("fails", [True, False])
def test_cluster_that_has_ended_gives_its_processes_back_by_itself_and_still_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool
) -> None:
    use_settings(monkeypatch, stay_s=0.2)
    gate = Gate.at(tmp_path / "gate")

    def end(gate: Gate, ctx: NodeContext) -> Any:
        gate.wait()
        return object() if not fails else 1 // 0

    with ExitStack() as stack:
        cluster = launch(end, gate, 1)
        stack.callback(cluster.abort)
        pair = processes()["worker:0"]  # before it ends
        gate.open()
        assert all_gone([pair.agent, pair.child])
        assert cluster.status() == ("Failed" if fails else "Finished")
        assert cluster.world.size == 1
        assert set(cluster.stacks().values()) == {"the cluster has ended"}
        if fails:
            for ask in (cluster.results, lambda: cluster.feed(range(10)), cluster.shutdown):
                with pytest.raises(NodeFailedError, match="ZeroDivisionError"):
                    ask()
        else:
            report = cluster.feed(range(100), epochs=2)
            assert (report.rows_used, report.epochs) == (0, 0), "nobody is there"
            with pytest.raises(ResultError, match=r"worker:0 \(rank 0\): result is a builtins.ob"):
                cluster.results()
            cluster.shutdown()
        assert cluster.status() == "Stopped"


def test_results_that_are_still_being_read_keep_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    use_settings(monkeypatch, stay_s=0.0)
    rows = [f"{number:09}" * 5_000 for number in range(2000)]  # more than a connection buffers

    def double(args: None, ctx: NodeContext) -> None:
        feed, count = ctx.get_data_feed(train_mode=False), 0
        while not feed.should_stop():
            feed.batch_results([2 * row for row in feed.next_batch(100)])
            count += 100
            ctx.report(count)

    with launch(double, nodes=1) as cluster:
        agent = processes()["worker:0"].agent
        results = cluster.infer(rows)
        assert next(results) == 2 * rows[0]
        assert cluster.reported(1999, SOON_S)[0] == 2000, "not all rows are there"
        cluster.end_feeds()
        told_to_go = Deadline.after(SOON_S)
        assert cluster._controller.wait_for(
            lambda view: has_ended(view.state) and math.isinf(view.state.deadline_s), told_to_go
        )
        assert cluster.stacks() == {"worker:0": "the child has ended"}, "its agent is there"
        assert list(results) == [2 * row for row in rows[1:]]
        assert all_gone([agent])


def test_shutdown_waits_for_map_fun_and_is_there_once(tmp_path: Path) -> None:
    gate = Gate.at(tmp_path / "gate")

    def leave_slowly(args: Gate, ctx: NodeContext) -> str:
        feed = ctx.get_data_feed()
        while not feed.should_stop():
            feed.next_batch(10)
        args.wait()
        return "exported"

    cluster = launch(leave_slowly, gate, 1)
    with ThreadPoolExecutor(2) as pool:
        shutdowns = [pool.submit(cluster.shutdown) for _ in range(2)]
        with gate.wait_until_reached():  # the end of the feed has come
            assert not any(shutdown.done() for shutdown in shutdowns)
        for shutdown in shutdowns:
            shutdown.result(SOON_S)
    cluster.shutdown()
    cluster.abort()
    assert cluster.results() == ["exported"]


def test_shutdown_that_takes_too_long_stops_map_fun_and_names_who_was_late() -> None:
    def hang_in_one(args: None, ctx: NodeContext) -> None:
        if ctx.rank == 1:
            signal.pause()

    cluster = launch(hang_in_one, feeding=Feeding(fed=False))
    them = processes()
    assert cluster._controller.wait_for(
        lambda view: getattr(view.state, "returned", {}).keys() == {0}, Deadline.after(SOON_S)
    )
    with pytest.raises(ShutdownTimeoutError, match=r"^worker:1 had not returned"):
        cluster.shutdown(timeout_s=0.5)
    assert all_gone([pair.agent for pair in them.values()])
    cluster.shutdown()


def test_with_block_that_raises_stops_at_once_whoever_waits_and_raises_its_own_error() -> None:
    them, waiting = {}, list[Any]()

    def block(pool: ThreadPoolExecutor) -> None:
        with launch(hang, nodes=1, feeding=Feeding(fed=False)) as cluster:
            them.update(processes())
            with pytest.raises(ConfigError, match=r"launch it without Feeding\(fed=False\)"):
                cluster.feed([1])
            waiting.extend([pool.submit(cluster.results).result, cluster.results, cluster.wait])
            raise KeyError("mine")

    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyError, match="mine"):
        block(pool)
    assert len(them) == 1
    assert all_gone([pair.child for pair in them.values()], within_s=0)
    for ask in waiting:
        with pytest.raises(ResultError, match="stopped before worker:0 had returned"):
            ask()
