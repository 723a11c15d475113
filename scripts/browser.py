"""The Chromium in which tests look at the dashboard, and the pictures of docs/dashboard.

python -m scripts.browser install         install one where that is possible; tests of pages
                                          are skipped where there is none
python -m scripts.browser screenshots     of pages, while a small training runs and recovers
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from sparkdl import NodeContext

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
FOLDER = Path(__file__).parent.parent / "docs" / "dashboard"
WAIT = threading.Event().wait
STEP_S = 0.12
EPOCHS = 20
SLOW = 1
WIDTH, HEIGHT = 1280, 900


def find() -> str | None:
    """Return the path of a Chromium, if there is one."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


@contextmanager
def browser() -> Iterator[Browser]:
    """Start it, and end it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=find(), args=list(_FLAGS))
        yield started
        started.close()


def install() -> None:
    """Install one where there is none, as root of a Debian."""
    if find() is None and os.geteuid() == 0 and shutil.which("apt-get") is not None:
        install = ("apt-get", "install", "-y", "-q", "--no-install-recommends", "chromium")
        for command in (("apt-get", "update", "-q"), install):
            subprocess.run(command, capture_output=True, check=False)


def train(args: Any, ctx: NodeContext) -> None:
    """Look like a training in step that gets better, whose second node is the slowest."""
    last = ctx.last_checkpoint
    step = first = last.step if last else 0
    batches = chain.from_iterable(ctx.batches(64) for _ in range(EPOCHS))
    for step, _ in enumerate(batches, first + 1):
        threading.Event().wait(STEP_S * (1.6 if ctx.rank == SLOW else 1))
        ctx.barrier()
        loss = 1.2 / (1 + step / 25) + 0.01 * (hash((step, ctx.rank)) % 7)
        ctx.report(step, loss=loss, accuracy=1 - loss / 2)
        if step % 40 == 0:
            with ctx.checkpoint(step) as folder:
                (folder / f"weights-{ctx.rank}").write_text(str(loss))
        if step % 10 == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
    print("the epoch is over after", step, "steps", flush=True)


def kill_one() -> None:
    """Kill the child of the third node."""
    from tests.doubles.nodes import processes

    os.kill(processes()["worker:2"].child.pid, signal.SIGKILL)


def take_screenshots() -> None:
    """Take all of them."""
    from PIL import Image

    import sparkdl
    from sparkdl.dashboard.pages import PAGES

    assert find(), "there is no Chromium here"
    FOLDER.mkdir(exist_ok=True)
    rows = [(float(number),) * 8 for number in range(4 * 64 * 60)]
    with (
        tempfile.TemporaryDirectory() as folder,
        sparkdl.launch(
            *(None, train, None, 4),
            framework="plain",
            executor="local",
            observe=sparkdl.Observe(dashboard=True, progress=False),
            max_restarts=2,
            checkpoint_dir=folder,
        ) as cluster,
    ):
        cluster.feed_async(rows, epochs=EPOCHS)
        WAIT(30)
        kill_one()
        WAIT(75)
        with browser() as started:
            page = started.new_page(
                viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light"
            )
            page.goto(str(cluster.dashboard_url))
            for shown in PAGES:
                page.click(f"nav a[href^={shown.path}]")
                page.wait_for_selector("[role=status]")
                page.wait_for_timeout(2000)
                taken = Image.open(io.BytesIO(page.screenshot()))
                small = taken.convert("RGB").quantize(160, dither=Image.Dither.NONE)
                small.save(FOLDER / f"{shown.path}-light.png", optimize=True)
        cluster.abort()  # the feed as well


if __name__ == "__main__":
    {"install": install, "screenshots": take_screenshots}[sys.argv[1]]()
