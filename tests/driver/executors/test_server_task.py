"""How the process of a Spark Connect server waits for the client to feed a micro-batch."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sparkdl.driver.executors import server_task
from sparkdl.driver.executors.server_task import STOPPED, HandOver


class Session(dict[str, str]):
    """The settings and views of a session, which are its own `conf` and `catalog`."""

    def __init__(self) -> None:
        super().__init__()
        self.conf = self.catalog = self.sparkSession = self
        self.views: list[str] = []

    def set(self, name: str, value: str) -> None:
        self[name] = value

    def createOrReplaceGlobalTempView(self, name: str) -> None:  # noqa: N802 (Spark's)
        self.views.append(name)

    def dropGlobalTempView(self, name: str) -> None:  # noqa: N802 (Spark's)
        self.views.remove(name)


def test_micro_batch_is_shown_until_the_client_says_that_the_nodes_have_it() -> None:
    data: Any = Session()
    work = threading.Thread(target=HandOver(data, "s"), args=(data, 3))
    data["s.said"] = "2 17"
    work.start()
    while "s.ready" not in data:
        work.join(0.01)
    assert (data["s.ready"], data.views) == ("3", ["s_3"])
    data["s.said"] = "3 18"
    work.join(10)
    assert not work.is_alive()
    assert data.views == []


def test_micro_batch_that_the_nodes_do_not_take_fails_the_query() -> None:
    data: Any = Session()
    data["s.said"] = "stop 1"
    with pytest.raises(RuntimeError, match=STOPPED):
        HandOver(data, "s")(data, 0)
    assert data.views == []


def test_client_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_task, "SILENT_S", 0.2)
    data: Any = Session()
    with pytest.raises(TimeoutError, match="said nothing"):
        HandOver(data, "s")(data, 0)
