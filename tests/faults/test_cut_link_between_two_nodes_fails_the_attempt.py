"""An agent that the driver reaches does not answer another one, which fetches its rows."""

from __future__ import annotations

import logging
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sparkdl.control.messages import Assign
from sparkdl.core.options import Recovery
from tests.doubles.ledger import Plan, lost_and_doubled, table, train
from tests.doubles.nodes import SOON_S, launch, use_settings
from tests.doubles.proxy import Proxy

ROWS = 400


def test_node_that_cannot_fetch_is_the_cause_and_the_restart_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_settings(monkeypatch, lease_s=1.0)
    caplog.set_level(logging.WARNING)
    links, stack = list[Proxy](), ExitStack()

    def assign(*about: Any, **more: Any) -> Assign:
        uris: dict[int, str] = more.get("uris", {})
        if uris and not links:
            links.append(stack.enter_context(Proxy(next(iter(uris.values())))))
            links[0].stall()
        if uris and "restart 1 of 1" not in caplog.text:
            more["uris"] = dict.fromkeys(uris, links[0].uri)
        return Assign(*about, **more)

    monkeypatch.setattr("sparkdl.driver.feeds.transitions.Assign", assign)
    options: dict[str, Any] = {"recovery": Recovery(host_timeout_s=4.0), "max_restarts": 1}
    with launch(train, Plan(), checkpoint_dir=str(tmp_path), **options) as cluster, stack:
        cluster.feed(table(ROWS), timeout_s=3 * SOON_S)
        results = cluster.results(3 * SOON_S)
        assert cluster.world.generation == 1
    cause = (
        r"restart 1 of 1 because worker:(\d) .* cannot fetch rows from worker:(?!\1)\d: no answer"
    )
    assert re.search(cause, caplog.text)
    assert lost_and_doubled(results, ROWS) == (0, 0)
