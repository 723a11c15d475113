"""Take the pictures of docs/dashboard.md: of each page, while a small training runs and recovers.

Usage: python -m scripts.screenshots
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil

import sparkdl
from scripts import chromium
from sparkdl.dashboard.pages import PAGES

FOLDER = Path(__file__).parent.parent / "docs" / "dashboard"
WAIT = threading.Event().wait
STEP_S = 0.12
WIDTH, HEIGHT = 1180, 720


def train(args: Any, ctx: sparkdl.NodeContext) -> None:
    """Look like a training that gets better."""
    step = 0
    for step, _ in enumerate(ctx.batches(64)):
        threading.Event().wait(STEP_S)
        loss = 1.2 / (1 + step / 25) + 0.01 * (hash((step, ctx.rank)) % 7)
        ctx.report(step, loss=loss, accuracy=1 - loss / 2)
        if step % 10 == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
    print("the epoch is over after", step, "steps", flush=True)


def kill_one(cluster: sparkdl.Cluster) -> None:
    """Kill the child of the third node."""
    rank = 2
    lines = cluster.stacks()
    assert len(lines) > rank
    for process in psutil.Process().children(recursive=True):
        if process.environ().get("SPARKDL_NODE") == f"worker:{rank}" and not process.children():
            os.kill(process.pid, signal.SIGKILL)
            return


def main() -> None:
    """Take all of them."""
    assert chromium.find(), "there is no Chromium here"
    FOLDER.mkdir(exist_ok=True)
    options = {"framework": "plain", "executor": "local", "show_progress": False}
    rows = [(float(number),) * 8 for number in range(4 * 64 * 400)]
    with sparkdl.launch(None, train, None, 4, dashboard=True, max_restarts=2, **options) as cluster:
        cluster.feed_async(rows)
        WAIT(14)
        kill_one(cluster)
        WAIT(14)
        with chromium.browser() as browser:
            for scheme in ("light", "dark"):
                page = browser.new_context(
                    viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme
                ).new_page()
                page.goto(cluster.dashboard_url)
                for shown in PAGES if scheme == "light" else PAGES[:1]:
                    page.click(f"nav a[href^={shown.path}]")
                    page.wait_for_selector("[role=status]")
                    page.wait_for_timeout(3000)
                    page.screenshot(path=FOLDER / f"{shown.path}-{scheme}.png")
        cluster.abort()  # the feed as well


if __name__ == "__main__":
    main()
