"""`ctx.checkpoint` on storages that cannot rename: two nodes and the driver's side of it."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow.fs as pafs
import pytest

from sparkdl.control.channel import CheckpointBegun
from sparkdl.control.messages import CheckpointCommit, CheckpointDone, CheckpointPart
from sparkdl.core.errors import CheckpointError, ConfigError
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.world import Address, CheckpointRef, Resume, build_world
from sparkdl.driver.collect import Checkpoints
from sparkdl.driver.feeds.coverage import CoverageStore
from sparkdl.node import checkpoints as checkpoint
from sparkdl.node.checkpoint_store import CheckpointStore
from sparkdl.node.context import NodeContext, leave
from tests.doubles.feeds import SOON_S

NODES = plan_nodes(2)
WORLD = build_world(0, {node: Address("h", node.node_id, "") for node in NODES})
URL = "hdfs://namenode/checkpoints"


class Driver:
    def __init__(self) -> None:
        self.checkpoints = Checkpoints("c", CoverageStore())
        self.to_first: queue.Queue[CheckpointCommit] = queue.Queue()
        self.made: list[CheckpointRef] = []
        self.used: dict[int, Any] = {}
        self._lock = threading.Lock()

    def heard(self, node_id: int, message: Any) -> None:
        with self._lock:
            if isinstance(message, CheckpointDone):
                self.made += [ref] if (ref := self.checkpoints.done(0, message)) else []
            elif isinstance(message, CheckpointBegun):
                self.used[node_id] = message.feeds
            else:
                part = CheckpointPart(0, message.step, self.used[node_id], message.problem)
                if word := self.checkpoints.part(WORLD, node_id, part, 1e9):
                    self.to_first.put(word[1])


class Link:
    def __init__(self, driver: Driver, node_id: int) -> None:
        self.driver, self.node_id = driver, node_id
        self.feeds = self

    def positions(self, batches: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"parquet:0": {0: {self.node_id: ((0, batches),)}}} if batches else {}, {}

    def send(self, message: Any) -> None:
        self.driver.heard(self.node_id, message)

    def wait_commit(self, step: int, deadline: Any) -> CheckpointCommit | None:
        while (news := self.driver.to_first.get(timeout=SOON_S)).step != step:
            continue
        return news


@pytest.fixture
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return what makes the contexts of both nodes, on storage that is a folder here."""
    remote = tmp_path / "remote"
    remote.mkdir()

    def open_store(url: str, scratch: Path | None = None) -> CheckpointStore:
        assert url == URL
        system = pafs.SubTreeFileSystem(str(remote), pafs.LocalFileSystem())
        return CheckpointStore(system, "checkpoints", url, scratch or tmp_path / "driver")

    monkeypatch.setattr(checkpoint, "open_store", open_store)

    def make(ref: CheckpointRef | None = None) -> Any:
        driver = Driver()
        spec = ClusterSpec("c", NODES, checkpoint_dir=URL)
        made = [
            NodeContext(
                WORLD,
                member,
                spec,
                cast(Any, Link(driver, member.node.node_id)),
                cast(socket.socket, None),
                Resume(0, ref),
                tmp_path / f"scratch-{member.rank}",
            )
            for member in WORLD.members
        ]
        return SimpleNamespace(driver=driver, nodes=made, store=open_store(URL), remote=remote)

    return make


def write(ctx: NodeContext, step: int) -> None:
    with ctx.checkpoint(step) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / f"part-{ctx.rank}").write_text(f"{step}")


def test_nodes_upload_parts_and_a_manifest(contexts: Callable[..., Any], tmp_path: Path) -> None:
    it = contexts()
    write(it.nodes[1], 1)
    assert it.store.newest() is None, "a part is no checkpoint"
    write(it.nodes[0], 1)
    (ref,) = it.driver.made
    assert ref == CheckpointRef(f"{URL}/step-0000000001-c-0", 1, 0)
    assert it.store.newest().manifest.files == {"deep/part-0": 1, "deep/part-1": 1}
    assert not [path for n in (0, 1) for path in (tmp_path / f"scratch-{n}").iterdir()]

    last = contexts(ref).nodes[1].last_checkpoint
    assert (last.step, last.url) == (1, ref.url)
    assert last.folder.is_relative_to(tmp_path / "scratch-1")
    assert Path(last, "deep", "part-0").read_text() == "1"
    assert last.folder is last.folder, "it is downloaded once"


def test_part_that_cannot_be_uploaded_leaves_those_before(contexts: Callable[..., Any]) -> None:
    it = contexts()
    for ctx in reversed(it.nodes):
        write(ctx, 1)
    blocker = it.remote / "checkpoints" / "step-0000000002-c-0"
    blocker.write_text("not a folder")
    with pytest.raises(CheckpointError, match="step 2 could not be written") as caught:
        write(it.nodes[1], 2)
    assert isinstance(caught.value.__cause__, OSError)
    blocker.unlink()
    with pytest.raises(CheckpointError, match="worker:1 could not write its part"):
        write(it.nodes[0], 2)
    assert it.store.newest().ref.step == 1
    assert not blocker.exists(), "nothing of the second is left"


def test_steps_go_on_from_the_last_checkpoint(contexts: Callable[..., Any]) -> None:
    it = contexts(CheckpointRef(f"{URL}/step-0000000007-b-0", 7, -1))
    with pytest.raises(ConfigError, match=r"feeds continue at step 7: load ctx\.last_checkpoint"):
        write(it.nodes[0], 6)


def test_checkpoint_that_cannot_be_fetched_is_an_error(contexts: Callable[..., Any]) -> None:
    it = contexts(CheckpointRef(f"{URL}/step-0000000007-b-0", 7, -1))
    with pytest.raises(CheckpointError, match="step-0000000007-b-0 cannot be read"):
        _ = it.nodes[0].last_checkpoint.folder


def test_base_stays_while_the_world_needs_it_and_is_its_path(contexts: Callable[..., Any]) -> None:
    first = contexts()
    with ThreadPoolExecutor(2) as nodes:
        list(nodes.map(lambda ctx: write(ctx, 1), first.nodes))
    (base,) = first.driver.made
    it = contexts(base)
    with ThreadPoolExecutor(2) as nodes:
        for step in range(2, 8):
            list(nodes.map(partial(write, step=step), it.nodes))
    left = [entry.name.step for entry in it.store.entries()]
    assert sorted(left) == [1, 5, 6, 7], "three are kept, and the base"
    last = it.nodes[1].last_checkpoint
    assert str(last) == os.fspath(last) == f"{last}"
    assert Path(f"{last}/deep/part-0").read_text() == "1"
    assert Path(os.path.join(last, "deep", "part-1")).read_text() == "1"
    assert repr(last) == f"LastCheckpoint(step=1, url={base.url!r})"


def write_async(ctx: NodeContext, step: int, *waits: Any) -> None:
    with ctx.checkpoint_async(step, 10 * step) as saving:
        for each in (partial((saving.folder / f"part-{ctx.rank}").write_text, "1"), *waits):
            saving.until(each)


def test_second_waits_for_the_checkpoint_in_flight_and_each_covers_its_own_rows(
    contexts: Callable[..., Any],
) -> None:
    it, written = contexts(), Future[None]()
    write_async(it.nodes[0], 1)
    write_async(it.nodes[1], 1, SimpleNamespace(wait_until_finished=written.result))  # Orbax's
    with ThreadPoolExecutor(2) as nodes:
        both = [nodes.submit(write_async, ctx, 2) for ctx in it.nodes]
        assert not wait(both, 0.2).done
        assert it.store.newest() is None, "a node still writes"
        written.set_result(None)
    leave(it.nodes[0])
    manifests = [it.store.manifest(ref.url.rpartition("/")[2]) for ref in it.driver.made]
    assert [m.feeds["parquet:0"].rows[0][0][1] for m in manifests] == [((0, 10),), ((0, 20),)]


def test_training_goes_on_while_parts_are_uploaded(
    contexts: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    local: Any = pytest.importorskip("fsspec.implementations.local")
    go = threading.Event()

    class Slow(local.LocalFileSystem):  # type: ignore[misc]  # imported late
        def _open(self, path: str, mode: str = "rb", **given: Any) -> Any:
            assert mode == "rb" or go.wait(SOON_S)
            return super()._open(path, mode, **given)

    it, system = contexts(), pafs.PyFileSystem(pafs.FSSpecHandler(Slow(skip_instance_cache=True)))
    make = partial(CheckpointStore, system, f"{it.remote}/checkpoints")
    monkeypatch.setattr(checkpoint, "open_store", make)
    write_async(it.nodes[0], 1)
    with it.nodes[1].checkpoint_async(1) as saving:  # as with torch.save
        (saving.folder / "part-1").write_text("1")
    assert not [path for path in it.remote.rglob("*") if path.is_file()]
    go.set()
    for ctx in it.nodes:
        leave(ctx)
    assert it.store.newest().manifest.files == {"part-0": 1, "part-1": 1}


def test_error_of_a_write_is_raised_once_at_the_end_or_before(contexts: Callable[..., Any]) -> None:
    it = contexts()
    for ctx in reversed(it.nodes):
        write_async(ctx, 1, *[partial(int, "x")] * ctx.rank)
    with pytest.raises(CheckpointError, match=r"1: worker:1 could not .* ValueError"):
        write(it.nodes[0], 2)
    with pytest.raises(CheckpointError, match=r"step 1: its files .* ValueError"):
        leave(it.nodes[1])
    for step, ctx in ((2, it.nodes[1]), (3, it.nodes[1]), (3, it.nodes[0])):
        write(ctx, step)
    assert it.store.newest().ref.step == 3


def test_block_must_name_what_it_waits_for(contexts: Callable[..., Any]) -> None:
    ctx, end = contexts().nodes[1], threading.Event()
    saver = threading.Thread(target=end.wait, name="AsyncCheckpointExecutor_0")  # PyTorch's
    refusal = pytest.raises(CheckpointError, match="has not finished at the end of the block")
    with refusal, ctx.checkpoint_async(1) as saving:
        with pytest.raises(ConfigError, match=r"until\(7\): must be a future or a function"):
            saving.until(7)
        saver.start()
    end.set()
    saver.join()
    with pytest.raises(ConfigError, match="after the block"):
        saving.until(Future())
