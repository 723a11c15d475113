"""`launch(log_dir=…)`: all lines of all nodes in files that are rotated; no disk harms anybody."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from sparkdl.control.messages import LogLines
from sparkdl.core.errors import ConfigError
from sparkdl.driver import log_files
from sparkdl.driver.events import Logged
from sparkdl.driver.log_files import LogFiles, check_folder
from sparkdl.driver.options import Observe
from sparkdl.node.context import NodeContext
from tests.doubles.limits import full_disk
from tests.doubles.nodes import SOON_S, launch
from tests.doubles.until import until


def test_each_node_has_a_file_of_all_its_lines_and_nothing_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def speak(args: None, ctx: NodeContext) -> None:
        for i in range(5000):
            print(f"{ctx.rank} {i}")
        print("WARNING: All log messages before absl::InitializeLog() is called are written")
        print("é unfinished", end="")

    folder = tmp_path / "a" / "logs"
    for _ in range(2):
        with launch(speak, observe=Observe(log_dir=str(folder))) as cluster:
            cluster.wait(SOON_S)
        for rank in (0, 1):
            file = folder / f"sparkdl-{cluster.spec.cluster_id}" / f"worker-{rank}.log"
            numbers = [f"{rank} {i}" for i in range(5000)]
            first, *rest = file.read_text("utf-8").splitlines()[5000:]
            assert file.read_text("utf-8").splitlines()[:5000] == numbers
            assert first.startswith("WARNING: All log")
            assert rest == ["é unfinished"]
    assert len(list(folder.iterdir())) == 2, "clusters do not share files"
    assert capsys.readouterr().out == ""


def logged(node: str, *lines: str) -> Logged:
    return Logged("c", 0.0, node, LogLines(lines))


@pytest.mark.parametrize(
    ("log_dir", "why"),
    [
        ("", "give the path of a folder"),
        (3, "give the path of a folder"),
        ("hdfs://host/logs", "is a URL"),
        ("dbfs:/logs", "is a URL"),
        ("/proc/logs", "cannot be written to on the driver's machine: "),
        ("/dev/null/logs", "cannot be written to on the driver's machine: Not a directory"),
    ],
)
def test_a_folder_that_cannot_be_is_refused(log_dir: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_folder("log_dir", log_dir)


def test_files_are_rotated_and_the_oldest_lines_go(tmp_path: Path) -> None:
    files = LogFiles(str(tmp_path), max_file_nbytes=1000, old_files=3)
    files.start()
    for i in range(100):
        files.put(logged("ps:1", f"{i:03}" + "x" * 96))
    files.close()
    names = ["ps-1.log.3", "ps-1.log.2", "ps-1.log.1", "ps-1.log"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    lines = [line for name in names for line in (tmp_path / name).read_text().splitlines()]
    numbers = [int(line[:3]) for line in lines]
    assert numbers == list(range(numbers[0], 100))
    assert all((tmp_path / name).stat().st_size < 1000 for name in names)


def test_a_full_disk_warns_once_and_lines_are_kept_again_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = LogFiles(str(tmp_path))
    files.start()
    with full_disk():
        for line in ("a", "b", "c"):
            files.put(logged("worker:0", line))
        assert until(lambda: len(caplog.records) == 1 and not files._events)
    files.put(logged("worker:0", "d"))
    files.close()
    assert (tmp_path / "worker-0.log").read_text().splitlines()[-1] == "d"
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert f"are missing in {tmp_path}: [Errno 27] File too large" in warning.getMessage()


def test_a_slow_disk_keeps_nobody_waiting_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_ready = threading.Event()
    write = log_files._NodeFile.write

    def slow(self: Any, text: str) -> None:
        assert is_ready.wait(SOON_S)
        write(self, text)

    monkeypatch.setattr(log_files._NodeFile, "write", slow)
    monkeypatch.setattr(log_files, "_MAX_WAITING", 10)
    files = LogFiles(str(tmp_path))
    files.start()
    for i in range(100):
        files.put(logged("worker:0", f"line {i}"))
    is_ready.set()
    files.close()
    assert "line 0" in (tmp_path / "worker-0.log").read_text()
    assert "the disk is too slow" in caplog.text
