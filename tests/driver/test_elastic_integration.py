"""A fed training whose world shrinks and grows uses each row once, as far as its model goes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from sparkdl.core.deadline import Deadline
from sparkdl.core.options import Recovery
from sparkdl.driver.lifecycle.state import Running
from sparkdl.driver.view import ClusterView
from sparkdl.node.context import NodeContext
from tests.doubles.gates import Gate
from tests.doubles.nodes import SOON_S, launch
from tests.driver.test_restart import no_room

__all__ = ["no_room"]

ROWS = 480


def collect(args: dict[str, Any], ctx: NodeContext) -> list[int]:
    """Train a model that is the list of its rows; the first node has what there was before."""
    last = ctx.last_checkpoint
    step, rows = 0, []
    if last:
        step = last.step
        if ctx.rank == 0:
            rows = [row for part in sorted(Path(last).glob("part-*")) for row in _read(part)]
    for batch in ctx.batches(4, ["value"], even=True):
        rows += batch["value"].tolist()
        step += 1
        if ctx.generation == 0 and ctx.rank == 1 and step == 12:
            args["no_room"].touch()
            agent_pid = int(os.environ["SPARKDL_AGENT_PID"])
            os.kill(agent_pid, signal.SIGKILL)  # this node is lost
            signal.pause()
        if step % 5 == 0:
            if ctx.generation == 1 and ctx.rank == 0:
                args["no_room"].unlink(missing_ok=True)
            with ctx.checkpoint(step) as folder:
                (folder / f"part-{ctx.rank}").write_text(json.dumps(rows))
            if ctx.generation == 1 and step == 15:
                args["gates"][ctx.rank].wait()
            if ctx.generation == 1 and step == 20:
                signal.pause()  # until all begin anew, one more
    return [ctx.generation, ctx.restarts, ctx.num_workers, *rows]


def _read(part: Path) -> list[int]:
    rows: list[int] = json.loads(part.read_text())
    return rows


def test_rows_of_a_world_that_shrinks_and_grows_are_used_once(
    tmp_path: Path, no_room: Path
) -> None:
    gates = [Gate.at(tmp_path / f"gate-{rank}") for rank in range(2)]
    options: dict[str, Any] = {"max_restarts": 1, "recovery": Recovery(min_nodes=2, wait_s=1.0)}
    folder = tmp_path / "checkpoints"
    args = {"no_room": no_room, "gates": gates}
    with launch(collect, args, nodes=3, checkpoint_dir=str(folder), **options) as cluster:
        feeding = cluster.feed_async(range(ROWS))
        with gates[0].wait_until_reached(), gates[1].wait_until_reached():
            assert cluster.world.size == 2
            assert cluster._controller.wait_for(_all_are_ready, Deadline.after(SOON_S))
        feeding.result(3 * SOON_S)
        results = cluster.results(SOON_S)
    assert [result[:3] for result in results] == [[2, 1, 3]] * 3
    assert sorted(row for result in results for row in result[3:]) == list(range(ROWS))


def _all_are_ready(view: ClusterView) -> bool:
    assert isinstance(view.state, Running)
    agents = view.state.registry.agents
    return len(agents) == 3 and all(agent.child for agent in agents.values())
