"""What do the dashboard and a record cost? The driver's part, and the process that keeps the past.

Takes samples of a simulated cluster by the real code, as fast as it goes, and prints what share of
a core that is at one sample a second. `README.md` says how to read it.
"""

from __future__ import annotations

import argparse
import resource
import threading
import time
from itertools import count
from pathlib import Path

import psutil
from msgspec.structs import replace

from scripts import chromium
from sparkdl.control.messages import NodeActive, NodeLoad
from sparkdl.control.rows import FeedCount, Given
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.world import Address, build_world
from sparkdl.dashboard.pages import PAGES
from sparkdl.driver.dashboard import Dashboard
from sparkdl.driver.events import SUFFIX, Changed, Launched, Place, event_of, line_of
from sparkdl.driver.history import History
from sparkdl.driver.lifecycle.state import Roster, Running
from sparkdl.driver.view import View, sampled

LONG_TASKS = """() => { window.busy_ms = 0; new PerformanceObserver(list => {
    for (const task of list.getEntries()) window.busy_ms += task.duration;
}).observe({ type: "longtask" }) }"""
"""Tasks of more than 50 ms, in which a page answers nobody: https://w3c.github.io/longtasks/"""


def view_of(spec: ClusterSpec, step: int) -> View:
    """Return what a controller would know after so many steps."""
    world = build_world(
        0, {node: Address(f"h{node.node_id}", 1, "grpc://x") for node in spec.nodes}
    )
    view = View(Running(Roster(spec), world, frozenset(range(len(spec.nodes)))))
    for node in spec.nodes:
        rows = 100 * step + node.node_id
        view.feeds[node.node_id, "input"] = FeedCount("input", rows + 50, Given(rows, steps=step))
        waited = {"watched_s": 1.0 + step, "rows_s": 0.1 * step, "others_s": 0.2 * step}
        metrics: dict[str, float | str] = {"loss": 1 / (step + 1), "auc": 0.5}
        view.activity[node.node_id] = replace(NodeActive(0, step, metrics), **waited)
        view.load[node.node_id] = NodeLoad(1.5, 10**9, 10**7, 10**9)
        view.pids[node.node_id] = 4000 + node.node_id
    return view


def measure(nodes: int, hours: float, samples: int) -> None:
    """Print a line for a cluster of so many nodes."""
    spec = ClusterSpec("c", plan_nodes(nodes))
    views = [view_of(spec, step) for step in range(10)]
    start_s = time.process_time()
    lines = [line_of(sampled(spec, float(n), views[n % 10])) for n in range(samples)]
    taking = (time.process_time() - start_s) / samples
    seconds = int(hours * 3600)
    history = History("c", 0.0)
    history.add(Launched("c", 0.0, "plain", tuple(node.name for node in spec.nodes)))
    start_s, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for second in range(seconds):
        event = event_of(lines[second % samples])
        history.add(event.__class__(**{**{f: getattr(event, f) for f in event.__struct_fields__},
                                       "time_s": float(second)}))  # fmt: skip
    keeping = (time.process_time() - start_s) / seconds
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"{nodes:>6} nodes: driver {taking:.2%} of a core, {len(lines[-1]):,} bytes a second; "
        f"dashboard {keeping:.2%} of a core and {grown:.0f} MiB after {hours:g} h, "
        f"{len(history.samples.series.columns['time_s']):,} points a curve",
        flush=True,
    )


def measure_page(nodes: int, seconds: float) -> None:
    """Print a line for each page of a cluster of so many nodes, in a real browser.

    Its samples come once a second, as those of a real cluster do.
    """
    spec = ClusterSpec("c", plan_nodes(nodes))
    views = [view_of(spec, step) for step in range(10)]
    shown = Dashboard("127.0.0.1", (0,), "")
    process = psutil.Process(shown._process.pid)
    start_s, ends = time.time(), threading.Event()
    names = tuple(node.name for node in spec.nodes)
    places = tuple(Place(n, n, f"h{n % 100}") for n in range(nodes))
    record = Path(shown.folder, f"c{SUFFIX}")

    def tell() -> None:
        with record.open("wb", buffering=0) as file:
            file.write(line_of(Launched("c", start_s, "plain", names)))
            file.write(line_of(Changed("c", start_s, "running", 0, places)))
            shown.show(record)
            for turn in count():
                file.write(line_of(sampled(spec, time.time(), views[turn % 10])))
                if ends.wait(1.0):
                    return

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        with chromium.browser() as browser:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(shown.url)
            for shown_page in PAGES:
                name = shown_page.path
                began_s = time.monotonic()
                page.click(f"nav a[href^={name}]")
                page.wait_for_selector("[role=status]")
                took_s = time.monotonic() - began_s
                page.evaluate(LONG_TASKS)
                before_s = sum(process.cpu_times()[:2])
                page.wait_for_timeout(seconds * 1000)
                cpu = (sum(process.cpu_times()[:2]) - before_s) / seconds
                busy = page.evaluate("window.busy_ms") / 1000 / seconds
                print(
                    f"{nodes:>6} nodes: {name} is shown after {took_s:.2f} s; then {cpu:.1%} of a "
                    f"core for the dashboard; the page stands still for {busy:.1%} of the time",
                    flush=True,
                )
    finally:
        ends.set()
        teller.join()
        shown.close()


def main() -> None:
    """Measure clusters of several sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="2,64,1000")
    parser.add_argument("--hours", type=float, default=24.0, help="simulated")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument(
        "--browser", type=float, default=0.0, metavar="S", help="look at each page for S seconds"
    )
    given = parser.parse_args()
    for nodes in map(int, given.nodes.split(",")):
        if given.browser:
            measure_page(nodes, given.browser)
            continue
        measure(nodes, given.hours * min(1.0, 64 / nodes), given.samples)


if __name__ == "__main__":
    main()
