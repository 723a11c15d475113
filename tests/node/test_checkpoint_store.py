"""The folder of the checkpoints, on disks that can rename a folder and storages that cannot."""

from __future__ import annotations

from pathlib import Path

import pyarrow.fs as pafs
import pytest

from sparkdl.control.rows import FeedCoverage
from sparkdl.core.errors import CheckpointError
from sparkdl.node.checkpoint_store import (
    CheckpointName,
    CheckpointStore,
    LocalStore,
    Manifest,
    open_store,
)

NODES = ("chief:0", "worker:0")
FEEDS = {"input": FeedCoverage(2, {2: {0: {5: ((0, 7), (9, 12))}}})}


def disk(folder: Path) -> CheckpointStore:
    return open_store(f"file://{folder}/checkpoints")


def tree(folder: Path) -> CheckpointStore:
    system = pafs.SubTreeFileSystem(str(folder), pafs.LocalFileSystem())
    return CheckpointStore(system, "checkpoints", "hdfs://n/checkpoints", folder / "scratch")


def memory(folder: Path) -> CheckpointStore:
    fsspec = pytest.importorskip("fsspec")
    system = pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("memory")))
    path = f"/bucket{folder}/checkpoints"
    return CheckpointStore(system, path, f"s3:/{path}", folder / "scratch")


@pytest.fixture(params=[disk, tree, memory])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    opened: CheckpointStore = request.param(tmp_path)
    assert opened.check_writable(), "it creates the folder"
    assert not opened.check_writable()
    return opened


def named(step: int, cluster: str = "one", generation: int = 0) -> CheckpointName:
    return CheckpointName(step, cluster, generation)


def write(store: CheckpointStore, name: CheckpointName, nodes: tuple[str, ...] = NODES) -> None:
    for node in nodes:
        folder = store.open(name)
        (folder / "deep").mkdir(exist_ok=True)
        (folder / "deep" / node.replace(":", "-")).write_text(f"{node} {name.step}")
        store.finish(name, folder, node)


def make(store: CheckpointStore, name: CheckpointName, time_s: float = 1.0) -> str:
    write(store, name)
    manifest = Manifest(name.step, name.cluster_id, name.generation, time_s, NODES, FEEDS)
    store.commit(name, manifest)
    return store.url_of(name)


def steps(store: CheckpointStore) -> dict[str, bool]:
    return {str(entry.name): entry.is_complete for entry in store.entries()}


def test_parts_become_one_checkpoint_that_is_found_with_all_files(store: CheckpointStore) -> None:
    assert store.newest() is None
    url = make(store, named(5))
    assert url.endswith("/checkpoints/step-0000000005-one-0")
    found = store.newest()
    assert found is not None
    assert (found.ref.url, found.ref.step) == (url, 5)
    assert found.manifest.feeds == FEEDS
    assert found.manifest.files == {"deep/chief-0": 9, "deep/worker-0": 10}
    folder = store.fetch(str(named(5)))
    there = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    assert there == ["deep/chief-0", "deep/worker-0", "manifest.json"]
    assert (folder / "deep/worker-0").read_text() == "worker:0 5"


def test_part_that_is_elsewhere_is_missed(store: CheckpointStore) -> None:
    write(store, named(5), nodes=("chief:0",))
    with pytest.raises(CheckpointError, match=r"worker:0 has written its part .* elsewhere"):
        store.commit(named(5), Manifest(5, "one", 0, 1.0, NODES, {}))
    assert store.newest() is None


def test_checkpoint_without_a_file_is_none(store: CheckpointStore) -> None:
    for node in NODES:
        store.finish(named(5), store.open(named(5)), node)
    with pytest.raises(CheckpointError, match=r"step 5: no node has written a file .* wait for it"):
        store.commit(named(5), Manifest(5, "one", 0, 1.0, NODES, {}))
    assert store.newest() is None


def test_file_behind_the_end_breaks_its_checkpoint_and_no_other(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    make(store, named(5))
    folder = store.open(named(6))
    (folder / "early").write_text("1")
    for node in NODES:
        store.finish(named(6), folder, node)
        folder.mkdir(exist_ok=True)
    made = store.commit(named(6), Manifest(6, "one", 0, 1.0, NODES, {}))
    assert not store.late(named(6), made)
    with store._system.open_output_stream(f"{store._path}/{named(6)}/early") as file:
        file.write(b"12")
    assert store.late(named(6), made) == "early"
    assert not store.late(named(6)), "other nodes have no manifest"
    folder.mkdir(exist_ok=True)  # where a writer makes the folder again
    (folder / "late").write_text("2")
    assert store.late(named(6)).endswith("/late")
    if isinstance(store, LocalStore):
        found = store.newest()
        assert found is not None
        assert found.ref.step == 5, "the second folder shows it to a later job too"
        assert f"{store.url_of(named(6))} is broken and does not count: {folder}" in caplog.text
    store.revoke(named(6))
    store.revoke(named(6))
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.manifest(str(named(6)))
    assert steps(store)[str(named(5))]
    store.sweep(named(7), keep=1)
    assert steps(store) == {str(named(5)): True}


def test_newest_is_of_the_highest_step_and_then_the_latest(store: CheckpointStore) -> None:
    for time_s, name in enumerate([named(5), named(12, "two"), named(12, "aaa"), named(7)]):
        make(store, name, time_s)
    found = store.newest()
    assert found is not None
    assert found.ref.url.endswith(str(named(12, "aaa")))
    make(store, named(12, "zzz"), 1.5)  # whatever the order of a listing
    assert store.newest() == found


@pytest.mark.parametrize("hurt", ["manifest", "file", "gone"])
def test_checkpoint_that_is_not_whole_is_left_out(
    store: CheckpointStore, hurt: str, caplog: pytest.LogCaptureFixture
) -> None:
    make(store, named(5))
    make(store, named(6))
    system, path = store._system, f"{store._path}/{named(6)}"
    if hurt == "gone":
        system.delete_file(f"{path}/deep/chief-0")
    else:
        name = "manifest.json" if hurt == "manifest" else "deep/chief-0"
        with system.open_output_stream(f"{path}/{name}") as file:
            file.write(b'{"step": 6')
    found = store.newest()
    assert found is not None
    assert found.ref.step == 5
    assert "skipped" in caplog.text


def test_sweep_keeps_the_newest_and_deletes_what_never_became_one(store: CheckpointStore) -> None:
    for step in (1, 2, 3, 4, 8):
        make(store, named(step))
    write(store, named(9, "older"))
    write(store, named(3, generation=1))
    write(store, named(6, generation=1))
    make(store, named(5, generation=1))
    make(store, named(9, generation=2))
    store.sweep(named(5, generation=1), keep=3)
    assert steps(store) == {
        str(named(3)): True,
        str(named(4)): True,
        str(named(5, generation=1)): True,
        str(named(6, generation=1)): False,  # another node is ahead
        str(named(9, generation=2)): True,  # not ours to judge
    }
    store.sweep(named(5, generation=1), keep=1)
    assert str(named(4)) in steps(store), "the driver may not know of the newest one yet"
    assert str(named(3)) not in steps(store)


def test_sweep_keeps_what_the_world_goes_on_from(store: CheckpointStore) -> None:
    for step in (1, 2, 3, 4):
        make(store, named(step, "older"))
    make(store, named(5))
    store.sweep(named(5), keep=1, base=str(named(2, "older")))
    assert set(steps(store)) == {str(named(2, "older")), str(named(4, "older")), str(named(5))}


def test_world_that_begins_deletes_only_what_is_unfinished(store: CheckpointStore) -> None:
    make(store, named(2))
    write(store, named(3))
    write(store, named(3, "older"))
    write(store, named(2, generation=1))
    store.sweep_unfinished(named(2, generation=1))
    assert steps(store) == {str(named(2)): True, str(named(2, generation=1)): False}


def test_given_up_checkpoint_leaves_nothing(store: CheckpointStore) -> None:
    folder = store.open(named(1))
    (folder / "file").write_text("x")
    store.give_up(named(1), folder, for_all=True)
    assert steps(store) == {}
    assert not folder.exists()
