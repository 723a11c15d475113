"""The dashboard of a training: who may see it, what becomes of it, and that none waits for it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

import sparkdl
from sparkdl.cli import main
from sparkdl.core.errors import ConfigError
from sparkdl.driver import dashboard
from sparkdl.driver.events import Changed, Sampled, event_of
from sparkdl.driver.options import Observe
from tests.doubles.lazy import needs
from tests.doubles.nodes import launch

pytestmark = needs("bokeh")


def train(args: Any, ctx: sparkdl.NodeContext) -> int:
    for step in range(args):
        ctx.report(step, loss=1.0 / (step + 1))
        threading.Event().wait(0.1)
    return ctx.rank


def get(url: str, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], str]:
    parts = urlsplit(url)
    connection = HTTPConnection(str(parts.hostname), parts.port, timeout=30)
    try:
        connection.request("GET", f"{parts.path}?{parts.query}", headers=headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def page_of(url: str, page: str = "overview") -> str:
    return url.replace("/?", f"/{page}?")


def process() -> psutil.Process:
    found = [p for p in psutil.Process().children() if "sparkdl.dashboard.server" in p.cmdline()]
    assert len(found) == 1
    return found[0]


def check_record(folder: Path) -> None:
    """Assert that the record of twelve steps on two nodes holds what happened."""
    (file,) = folder.iterdir()
    events = [event_of(line) for line in file.read_bytes().splitlines()]
    assert [type(event).__name__ for event in events[:2]] == ["Launched", "Changed"]
    samples = [event for event in events if isinstance(event, Sampled)]
    assert samples[-1].steps == [11, 11]
    assert any(sum(sample.load.get("memory_nbytes", [])) > 1e6 for sample in samples)
    states = [event.state for event in events if isinstance(event, Changed)]
    assert states == ["gathering", "running", "finished", "stopping", "stopped"]


@pytest.mark.smoke
@pytest.mark.usefixtures("no_dashboard_stays")
def test_pages_open_for_who_has_the_token_and_no_training_waits_for_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All clusters of the program are on the same ones; the first is recorded as well."""
    records = tmp_path / "runs"
    with launch(train, 12, observe=Observe(dashboard=True, record=str(records))) as first:
        first.results()
    check_record(records)
    assert "ends here" not in caplog.text
    with launch(train, 10, nodes=1, observe=Observe(dashboard=True)) as second:
        url = second.dashboard_url
        assert url is not None
        assert url == first.dashboard_url
        status, headers, text = get(page_of(url))
        assert (status, "sparkdl" in text) == (200, True)
        assert "unsafe-eval" not in headers["Content-Security-Policy"]
        assert headers["Referrer-Policy"] == "no-referrer"
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        bare = page_of(url).partition("?")[0]
        assert get(bare, {"Cookie": cookie.partition(";")[0]})[0] == 200
        for wrong in (bare, f"{bare}?token=wrong", f"{bare}?token="):
            status, headers, text = get(wrong)
            assert (status, headers["Location"][:5], "bokeh" in text) == (302, "login", False)
        assert get(f"{bare.rpartition('/')[0]}/login?")[0] == 403
        process().send_signal(signal.SIGSTOP)
        assert second.results(60) == [0]


@pytest.mark.smoke
def test_process_and_its_records_go_with_a_program_that_is_killed() -> None:
    program = (
        "import os, signal, psutil, sparkdl\n"
        "from sparkdl.driver import dashboard\n"
        "def train(args, ctx): pass\n"
        "with sparkdl.launch(None, train, executor='local', framework='plain',"
        " feeding=sparkdl.Feeding(fed=False),"
        " observe=sparkdl.Observe(dashboard=True)) as cluster:\n"
        "    cluster.results()\n"
        "print(*(p.pid for p in psutil.Process().children() if 'sparkdl.dashboard.server' in"
        " p.cmdline()), dashboard._running[0].folder, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    pid, folder = done.stdout.split()
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(pid)).wait(10)
    assert not Path(folder).exists()


def test_folder_without_a_record_is_an_error_of_the_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", "--port", "0", str(tmp_path)]) == 1
    assert "no record is there" in capfd.readouterr().err


def test_training_does_not_notice_a_port_that_is_taken_nor_a_record_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are errors only for who asks, and a folder that cannot be one."""
    import socket

    def fail(event: Any) -> bytes:
        raise OSError("no room")

    monkeypatch.setattr(dashboard, "line_of", fail)
    wrong = tmp_path / "file"
    wrong.write_text("")
    with pytest.raises(ConfigError, match="record="):
        launch(train, 1, nodes=1, observe=Observe(record=str(wrong)))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("SPARKDL_DASHBOARD", "1")
        monkeypatch.setenv("SPARKDL_DASHBOARD_PORT", str(taken.getsockname()[1]))
        with pytest.raises(ConfigError, match="SPARKDL_DASHBOARD_PORT"):
            launch(train, 1, nodes=1, observe=Observe(dashboard=True))
        with launch(train, 1, nodes=1, observe=Observe(record=str(tmp_path / "runs"))) as cluster:
            assert cluster.dashboard_url is None
            assert cluster.results() == [0]
    assert "Continuing without a dashboard" in caplog.text
    assert "ends here after an error; the cluster continues" in caplog.text
