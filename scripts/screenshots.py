"""Take the pictures of docs/dashboard.md: of each page, while a small training runs and recovers.

Usage: python -m scripts.screenshots
"""

from __future__ import annotations

import io
import os
import signal
import tempfile
import threading
from itertools import chain
from pathlib import Path
from typing import Any

from PIL import Image

import sparkdl
from scripts import chromium
from sparkdl.dashboard.pages import PAGES
from tests.doubles.nodes import processes

FOLDER = Path(__file__).parent.parent / "docs" / "dashboard"
WAIT = threading.Event().wait
STEP_S = 0.12
EPOCHS = 20
SLOW = 1
WIDTH, HEIGHT = 1180, 900
PHONE = 390, 844


def train(args: Any, ctx: sparkdl.NodeContext) -> None:
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
    os.kill(processes()["worker:2"].child.pid, signal.SIGKILL)


def main() -> None:
    """Take all of them."""
    assert chromium.find(), "there is no Chromium here"
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
        with chromium.browser() as browser:
            for scheme, (width, height), pages in (
                ("light", (WIDTH, HEIGHT), PAGES),
                ("dark", (WIDTH, HEIGHT), PAGES[:1]),
                ("phone", PHONE, PAGES[:1]),
            ):
                context = browser.new_context(
                    viewport={"width": width, "height": height},
                    color_scheme="dark" if scheme == "dark" else "light",
                    is_mobile=scheme == "phone",
                )
                page = context.new_page()
                page.goto(str(cluster.dashboard_url))
                for shown in pages:
                    page.click(f"nav a[href^={shown.path}]")
                    page.wait_for_selector("[role=status]")
                    page.wait_for_timeout(2000)
                    taken = Image.open(io.BytesIO(page.screenshot()))
                    small = taken.convert("RGB").quantize(160, dither=Image.Dither.NONE)
                    small.save(FOLDER / f"{shown.path}-{scheme}.png", optimize=True)
                context.close()
        cluster.abort()  # the feed as well


if __name__ == "__main__":
    main()
