"""A driver of a real controller, whose agents are simulated by another process.

Writes what it has measured of a gathering, of the time after it without and with progress, and of
the loss of 1 % of the agents at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import claim_stdout, write

TOKEN = "a token of the benchmark"
SOON_S = 100.0


class Agents:
    """The other process."""

    def __init__(self, url: str, nodes: int) -> None:
        program = Path(__file__).parent / "control_agents.py"
        command = [sys.executable, str(program), url, TOKEN, "0", str(nodes)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def tell(self, line: str) -> None:
        """Have them do something."""
        assert self._process.stdin
        self._process.stdin.write(f"{line}\n")

    def ask(self, line: str) -> dict[str, Any]:
        """Have them do something that is answered."""
        self.tell(line)
        assert self._process.stdout
        return json.loads(self._process.stdout.readline())  # type: ignore[no-any-return]

    def close(self) -> None:
        """End them."""
        with self._process:
            assert self._process.stdin
            self._process.stdin.close()


def cpu_s() -> float:
    """Return the CPU time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident() -> int:
    """Return the memory that this process has now, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def load(agents: Agents, seconds: float) -> dict[str, float]:
    """Return what the next seconds cost: the share of a core, and bytes a second on the wire."""
    nbytes, cpu, start_s = agents.ask("count")["nbytes"], cpu_s(), time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - start_s
    share = (cpu_s() - cpu) / took_s
    return {"cores": share, "nbytes": (agents.ask("count")["nbytes"] - nbytes) / took_s}


def main() -> None:  # noqa: PLR0915 (one measurement after the other)
    """Gather, train, lose 1 %; write a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=15.0, help="for each load")
    parsed = parser.parse_args()
    lines = claim_stdout()

    from sparkdl.core.deadline import Deadline
    from sparkdl.core.settings import Settings
    from sparkdl.core.spec import ClusterSpec, plan_nodes
    from sparkdl.core.throttle import period_s
    from sparkdl.driver.controller import Controller
    from sparkdl.driver.ending import Ending
    from sparkdl.driver.executors.local import LocalExecutor
    from sparkdl.driver.handle import Cluster
    from sparkdl.driver.health import HangWatch
    from sparkdl.driver.lifecycle import state as states
    from sparkdl.feed.transfer.endpoint import PROGRESS_PERIOD_S

    nodes = parsed.nodes
    settings = Settings(max_restarts=1)
    spec = ClusterSpec("bench", plan_nodes(nodes), "plain", settings=settings)
    where = LocalExecutor()
    where.relaunch = lambda nodes: None  # type: ignore[method-assign]  # lost agents stay lost
    controller = Controller(spec, TOKEN, where)
    url = controller.start("127.0.0.1", (0,)).url
    HangWatch(controller, 600.0).start()
    agents = Agents(url, nodes)
    agents.ask("count")
    done = threading.Event()

    def rows() -> Iterator[Any]:
        done.wait()
        yield from ()

    try:
        before = cpu_s()
        start_s = time.monotonic()
        agents.tell("go")
        if not controller.gather(Deadline.after(SOON_S)) or not controller.wait_for(
            lambda view: (
                isinstance(view.state, states.Running) and len(view.state.in_map_fun) == nodes
            ),
            Deadline.after(SOON_S),
        ):
            raise TimeoutError(f"{len(controller.view.pids)} of {nodes} nodes are in map_fun")
        took_s, used_s = time.monotonic() - start_s, cpu_s() - before
        sent = agents.ask("count")["nbytes"]
        write(lines, {"event": "gathered", "s": took_s, "cpu_s": used_s, "nbytes": sent})
        world = controller.look(lambda view: view.state.world)  # type: ignore[union-attr]
        cluster = Cluster(spec, controller, where, TOKEN, world, False, Ending("bench", where))
        write(lines, {"event": "idle", **load(agents, parsed.seconds)})
        cluster.feed_async(rows())
        agents.tell(f"report {period_s(PROGRESS_PERIOD_S, nodes)}")
        controller.wait_for(lambda view: view.progress >= nodes, Deadline.after(SOON_S))
        write(lines, {"event": "reporting", **load(agents, parsed.seconds)})
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        write(lines, {"event": "memory", "nbytes": resident(), "peak_nbytes": peak})

        lost = max(1, nodes // 100)
        since_s = agents.ask(f"reset {lost}")["since_s"]
        controller.wait_for(
            lambda view: isinstance(view.state, states.Gathering), Deadline.after(SOON_S)
        )
        decided_s = time.monotonic() - since_s
        give_up = time.monotonic() + SOON_S
        while (counts := agents.ask("count"))["again"] < nodes - lost:
            if time.monotonic() > give_up:
                raise TimeoutError(f"{counts['again']} of {nodes - lost} agents heard of it")
            time.sleep(0.05)
        told_s = counts["again_s"] - since_s
        failures = len(controller.look(lambda view: view.state.failures))  # type: ignore[union-attr]
        write(
            lines,
            {
                "event": "lost",
                "decided_s": decided_s - settings.settle_s,
                "told_s": told_s - settings.settle_s,
                "known": failures,
                "lost": lost,
            },
        )
    finally:
        done.set()
        with contextlib.suppress(Exception):
            controller.close()
        agents.close()


if __name__ == "__main__":
    main()
