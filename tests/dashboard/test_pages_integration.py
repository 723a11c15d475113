"""The pages in a real browser: each shows what has happened in a real training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest

import sparkdl
from scripts import browser as chromium
from sparkdl import Observe
from sparkdl.driver import events
from tests.doubles.lazy import needs
from tests.doubles.nodes import launch, processes

pytestmark = [
    needs("bokeh", "playwright"),
    pytest.mark.skipif(chromium.find() is None, reason="there is no Chromium"),
]

EPOCHS = 3
EVIL = "<img src=x onerror=\"document.title='stolen'\"> <b>bold</b>"
PATHS = {
    "overview": "h2:text-is('Rows per second, all nodes')",
    "nodes": ".slick-cell:has-text('worker:1')",
}
"""And what a page shows of a training that runs."""
WAIT_MS = 20_000


@pytest.fixture
def browser(no_dashboard_stays: None) -> Iterator[Any]:
    with chromium.browser() as started:
        yield started


def train(args: Any, ctx: sparkdl.NodeContext) -> None:
    epochs = (ctx.batches(10) for _ in range(EPOCHS))
    steps = count()
    for step, batch in zip(steps, chain.from_iterable(epochs), strict=False):
        ctx.report(step, **{f"loss {EVIL}": 1.0 / (step + 1)})
        assert len(batch)
    while not Path(args).exists():
        threading.Event().wait(0.1)
        ctx.report(next(steps))


def look_at(page: Any, name: str) -> None:
    if f"/{name}" not in page.url:
        page.click(f"nav a[href^={name}]")
    page.wait_for_selector("[role=status]", timeout=WAIT_MS)


def note_errors(page: Any, problems: list[str]) -> None:
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.extend([said.text] * (said.type == "error")))


def check_on_a_phone_in_the_dark(browser: Any, url: str) -> None:
    context = browser.new_context(
        viewport={"width": 390, "height": 800}, color_scheme="dark", is_mobile=True
    )
    page = context.new_page()
    page.goto(url)
    for name in PATHS:
        look_at(page, name)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, f"{name} is {width} px wide"
    back = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert back != "rgb(255, 255, 255)"


@pytest.mark.smoke
@pytest.mark.timeout(120)
def test_pages_show_a_training_whose_node_is_killed(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, problems = tmp_path / "done", list[str]()
    monkeypatch.setenv("SPARKDL_DASHBOARD_PREFIX", "/team/dashboard")
    with launch(train, str(done), 2, max_restarts=1, observe=Observe(dashboard=True)) as cluster:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        note_errors(page, problems)
        page.goto(cluster.dashboard_url)
        cluster.feed([(float(n),) for n in range(800)], epochs=EPOCHS)
        for name, shown in PATHS.items():
            look_at(page, name)
            # The page that was opened first may still show how it began.
            running = f"running · cluster {cluster.spec.cluster_id} · 2 nodes"
            page.wait_for_selector(f"[role=status]:has-text('{running}')", timeout=WAIT_MS)
            assert page.title() == f"{name.capitalize()} · sparkdl"
            assert f"/team/dashboard/{name}" in page.url
            page.wait_for_selector(shown, timeout=WAIT_MS)
        page.wait_for_selector(".slick-header-column:has-text('Step, ms')", timeout=WAIT_MS)
        page.wait_for_selector(".slick-cell.l4:has-text('.')", timeout=WAIT_MS)
        step = page.inner_text(".slick-cell.l3")
        page.wait_for_selector(f".slick-cell.l3:not(:text-is('{step}'))", timeout=WAIT_MS)
        with suppress(ProcessLookupError):
            os.kill(processes()["worker:1"].child.pid, signal.SIGKILL)
        look_at(page, "overview")
        page.wait_for_selector("summary.bad:has-text('worker:1')", timeout=WAIT_MS)
        assert "killed" in page.inner_text("summary.bad")
        again = "[role=status]:has-text('attempt 2, because worker:1 was killed by SIGKILL')"
        page.wait_for_selector(again, timeout=WAIT_MS)
        ended = page.inner_text("tr:has(td:text-is('Attempt 1'))")
        assert ended.endswith("worker:1 was killed by SIGKILL")
        check_on_a_phone_in_the_dark(browser, str(cluster.dashboard_url))
        done.touch()
    page.wait_for_selector("[role=status] .good:text-is('finished')", timeout=WAIT_MS)
    assert page.title() == "Overview · sparkdl"
    assert not problems


def record(folder: Path) -> None:
    """Write the record of a run in which the second of two nodes raised."""
    locations = tuple(events.Location(node_id, node_id, "host") for node_id in range(2))
    load = {"cores": [1.0, 1.0], "memory_nbytes": [2.0**30, 2.0**31]}
    metrics: dict[str, list[float | None]] = {"loss": [0.5, 0.25], "balance": [-1.0, 0.0]}
    about = ["in map_fun"] * 2, [7, 8], [5, 5], metrics
    headline = "worker:1 (rank 1, pid 8) on host raised ValueError: no such column: price"
    problems = (events.Problem("worker:1", headline, f"{headline}\n  | the last words"),)
    told = [
        events.Launched("c", 0.0, "plain", ("worker:0", "worker:1")),
        events.Changed("c", 1.0, "running", 0, locations),
        *(events.Sampled("c", 1.0 + second, *about, {}, load) for second in range(1, 5)),
        events.Changed("c", 6.0, "failed", 0, (), problems),
        events.Changed("c", 6.1, "stopped", 0, (), problems, is_over=True),
    ]
    (folder / f"c{events.SUFFIX}").write_bytes(b"".join(map(events.line_of, told)))


@pytest.mark.smoke
@pytest.mark.timeout(120)
def test_recorded_run_that_failed_is_looked_at(browser: Any, tmp_path: Path) -> None:
    record(tmp_path)
    command = [sys.executable, "-m", "sparkdl", "dashboard", "--port", "0", str(tmp_path)]
    problems: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shown:
        try:
            assert shown.stdout
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            note_errors(page, problems)
            page.goto(shown.stdout.readline().strip())
            page.wait_for_selector("[role=status] .bad:text-is('failed')", timeout=WAIT_MS)
            why = "td:text-is('worker:1 raised ValueError: no such column: price')"
            page.wait_for_selector(why, timeout=WAIT_MS)
            titles = page.locator("h2:text-matches('loss|balance')").all_inner_texts()
            assert titles == ["loss", "balance"]
            page.click("summary:has-text('no such column: price')")
            assert "the last words" in page.inner_text("details pre")
            look_at(page, "nodes")
            page.wait_for_selector(".slick-cell:has-text('worker:1')", timeout=WAIT_MS)
            height = page.evaluate("document.documentElement.scrollHeight")
            assert page.locator(".slick-row").count() >= 2
            assert page.locator("h2:text-is('Memory per node')").bounding_box()["y"] < 400
            assert height < 1200, "no room is kept for nodes that there are not"
        finally:
            shown.send_signal(signal.SIGINT)
    assert not problems
