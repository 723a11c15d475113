"""Folders for a moment are gone after it, even of a killed process; where a path is."""

from __future__ import annotations

import getpass
import os
import signal
from pathlib import Path

import pytest

from sparkdl.core import files
from sparkdl.core.files import absolute_url, make_scratch_in, scratch_folder
from sparkdl.core.options import Feeding
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import SOON_S, launch


def test_folders_that_are_left_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_place", None)
    place = tmp_path / "scratch"
    for _ in range(2):
        make_scratch_in(place)
        assert not list(place.iterdir())
        with scratch_folder() as folder, scratch_folder() as other:
            (folder / "file").write_text("text")
            assert not list(other.iterdir())
            assert folder.parent == place
        assert [folder.exists(), other.exists()] == [False, False]
        (place / "left").mkdir()


def write_and_die(args: None, ctx: NodeContext) -> tuple[str, list[str]]:
    """Die with a folder in use, the first time; return where folders are, and what is there."""
    with scratch_folder() as folder:
        (folder / "weights").write_bytes(bytes(1 << 20))
        if not ctx.restarts:
            os.kill(os.getpid(), signal.SIGKILL)
        there = [str(path.relative_to(folder.parent)) for path in folder.parent.rglob("*")]
        return str(folder.parent), sorted(there)


def test_killed_process_leaves_nothing() -> None:
    with launch(write_and_die, nodes=1, max_restarts=1, feeding=Feeding(fed=False)) as cluster:
        ((place, there),) = cluster.results(SOON_S)
        folder, file = there
        assert file == f"{folder}/weights"
        assert Path(place).is_dir()  # whether it goes with the node is looked at after each test


@pytest.mark.parametrize(
    ("path", "default_fs", "expected"),
    [
        ("s3://b/x", "hdfs://nn:8020", "s3://b/x"),
        ("/x/*.parquet", "hdfs://nn:8020", "hdfs://nn:8020/x/*.parquet"),
        ("x", "hdfs://nn:8020", f"hdfs://nn:8020/user/{getpass.getuser()}/x"),
        ("/x", "file://", "file:///x"),
        ("x/k=?", "file://", "file:///home/me/x/k=?"),
    ],
)
def test_path_is_where_hadoop_would_look(path: str, default_fs: str, expected: str) -> None:
    assert absolute_url(path, default_fs, "/home/me") == expected
