"""Libraries that save in the background, inside the block of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import pytest

from sparkdl.core.errors import CheckpointError
from sparkdl.node.async_writers import waited_for
from tests.doubles.feeds import SOON_S

SLOW_S = 0.3


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_async_save_of_pytorch_ends_before_the_checkpoint_or_fails_it(tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    class Slow(dcp.FileSystemWriter):  # type: ignore[misc]
        def finish(self, metadata: Any, results: Any) -> None:
            Event().wait(SLOW_S)
            super().finish(metadata, results)

    class Full(dcp.FileSystemWriter):  # type: ignore[misc]
        def finish(self, metadata: Any, results: Any) -> None:
            raise OSError("No space left on device")

    state = {"w": torch.zeros(3)}
    with waited_for(SOON_S):
        dcp.async_save(state, storage_writer=Slow(tmp_path / "made"), no_dist=True)
        assert not (tmp_path / "made" / ".metadata").exists(), "it writes in the background"
    assert (tmp_path / "made" / ".metadata").exists()
    with (
        pytest.raises(CheckpointError, match=r"(?s)async_save, .* failed: .*No space left"),
        waited_for(SOON_S),
    ):
        dcp.async_save(state, storage_writer=Full(tmp_path / "full"), no_dist=True)
    with (
        pytest.raises(CheckpointError, match=r"not ended within Feeding\(timeout_s=0\.01\)"),
        waited_for(0.01),
    ):
        saved = dcp.async_save(state, storage_writer=Slow(tmp_path / "slow"), no_dist=True)
    saved.result(SOON_S)
    outside = dcp.async_save(state, storage_writer=Slow(tmp_path / "outside"), no_dist=True)
    assert not outside.done(), "a save of the program's own is not waited for"
    outside.result(SOON_S)


@pytest.mark.torch
@pytest.mark.deep
def test_plugin_of_lightning_ends_before_the_checkpoint_or_fails_it(tmp_path: Path) -> None:
    io = pytest.importorskip("lightning.pytorch.plugins.io")

    class Slow(io.TorchCheckpointIO):  # type: ignore[name-defined,misc]
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            Event().wait(SLOW_S)
            super().save_checkpoint(checkpoint, path, storage_options)

    plugin = io.AsyncCheckpointIO(Slow())
    try:
        with waited_for(SOON_S):
            plugin.save_checkpoint({"step": 1}, tmp_path / "made")
            assert not (tmp_path / "made").exists()
        assert (tmp_path / "made").exists()
        (tmp_path / "blocked").write_text("no folder")
        said = r"AsyncCheckpointIO, .* failed: .*blocked"
        with pytest.raises(CheckpointError, match=said), waited_for(SOON_S):
            plugin.save_checkpoint({"step": 2}, tmp_path / "blocked" / "file")
    finally:
        plugin._error = None
        plugin.teardown()


@pytest.mark.tensorflow
@pytest.mark.deep
def test_asynchronous_checkpoint_of_tensorflow_ends_before_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorflow as tf

    write = tf.train.Checkpoint._write

    def slow_write(self: Any, prefix: Any, options: Any = None) -> Any:
        if not options.experimental_enable_async_checkpoint:  # in the background
            Event().wait(SLOW_S)
        return write(self, prefix, options=options)

    monkeypatch.setattr(tf.train.Checkpoint, "_write", slow_write)
    state = tf.train.Checkpoint(v=tf.Variable(1.0))
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    with waited_for(SOON_S):
        state.write(str(tmp_path / "state"), options=options)
        assert not (tmp_path / "state.index").exists()
    assert (tmp_path / "state.index").exists()
    state._async_checkpointer_impl._join_async_save_thread()
