"""What the Keras callback counts: which steps it saves at, and which batches it says were used."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.core.errors import CheckpointError, ConfigError
from sparkdl.frameworks.keras_checkpoint import _Saver
from sparkdl.node.checkpoints import PendingCheckpoint


class Model:
    def save_weights(self, file: Any) -> None:
        assert str(file).endswith(".weights.h5")
        file.write(b"weights")


@dataclass
class Node:
    """A node that trains alone, on a feed from which batches are handed out ahead."""

    folder: Path
    given: dict[str, int] = field(default_factory=dict)
    last_checkpoint: Any = None
    rank: int = 0
    num_workers: int = 1
    made: list[tuple[int, Any, dict[str, int]]] = field(default_factory=list)

    def batches_given(self) -> dict[str, int]:
        return dict(self.given)

    @contextmanager
    def checkpoint_async(
        self, step: int, batches: int | Mapping[str, int] | None = None
    ) -> Iterator[PendingCheckpoint]:
        folder = self.folder / str(step)
        folder.mkdir()
        yield (saving := PendingCheckpoint(folder))
        assert not (folder / "model.weights.h5").exists()
        for write in saving._waits:
            write()
        assert (folder / "model.weights.h5").read_text() == "weights"
        self.made.append((step, batches, json.loads((folder / "training.json").read_text())))


def fit(
    saver: _Saver,
    node: Node,
    epochs: int,
    batches: int,
    *,
    initial_epoch: int = 0,
    executions: int = 1,
    steps_per_epoch: int | None = None,
    ahead: int = 2,
    feed: str = "input",
) -> None:
    """Call the hooks as Keras does: with the index of the last step of each execution."""
    for epoch in range(initial_epoch, epochs):
        saver.epoch_begin(epoch, steps_per_epoch is not None)
        start, used = node.given.get(feed, 0), 0
        while used < min(batches, steps_per_epoch or batches):
            end = used + executions - 1
            used = min(used + executions, batches)
            node.given[feed] = start + min(used + ahead, batches)
            saver.batch_end(Model(), end)
        node.given[feed] = start + used
        saver.epoch_end(Model(), epoch)


def made(node: Node) -> list[tuple[int, int, int]]:
    """Return the step, the batches and the epoch to go on with, of each checkpoint."""
    return [(step, batches["input"], said["epoch"]) for step, batches, said in node.made]


@pytest.mark.parametrize(
    ("every", "run", "expected"),
    [
        pytest.param((4, None), (3, 5), [(4, 4, 0), (8, 8, 1), (12, 12, 2)], id="steps"),
        pytest.param((None, 2), (4, 5), [(10, 10, 2), (20, 20, 4)], id="ends of epochs"),
        pytest.param((5, 1), (2, 5), [(5, 5, 0), (10, 10, 1)], id="an epoch's last step once"),
        pytest.param(
            (6, None), (2, 10, 4), [(8, 8, 0), (14, 14, 1), (18, 18, 1)], id="short executions"
        ),
    ],
)
def test_saves_are_at_steps_and_epochs(tmp_path: Path, every: Any, run: Any, expected: Any) -> None:
    """`run` is how many epochs of how many batches, in executions of how many steps."""
    node = Node(tmp_path)
    epochs, batches, *executions = run
    fit(_Saver(node, *every), node, epochs, batches, executions=(*executions, 1)[0])
    assert made(node) == expected


def test_epochs_of_a_number_of_steps_leave_what_is_read_ahead(tmp_path: Path) -> None:
    node = Node(tmp_path)
    saver = _Saver(node, None, 1)
    for epoch in range(2):  # one iteration of ten batches
        saver.epoch_begin(epoch, True)
        for step in range(4):
            node.given["input"] = min(4 * epoch + step + 3, 10)
            saver.batch_end(Model(), step)
        saver.epoch_end(Model(), epoch)
    assert made(node) == [(4, 4, 1), (8, 8, 2)]


def test_steps_go_on_at_the_checkpoint_and_batches_begin_anew(tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    (before / "training.json").write_text('{"step": 7, "epoch": 1}')
    node = Node(tmp_path, last_checkpoint=SimpleNamespace(folder=before))
    saver = _Saver(node, 4)
    assert saver.begun.epoch == 1
    fit(saver, node, 3, 3, initial_epoch=1)
    assert made(node) == [(8, 1, 1), (12, 5, 2)]


def test_feed_of_another_name_is_found_if_it_is_the_only_one(tmp_path: Path) -> None:
    node = Node(tmp_path)
    fit(_Saver(node, None, 1), node, 1, 3, feed="parquet:0")
    assert node.made[0][1] == {"parquet:0": 3}


def test_data_that_are_no_feed_name_no_batches(tmp_path: Path) -> None:
    node = Node(tmp_path)
    saver = _Saver(node, None, 1)
    saver.epoch_begin(0, True)
    saver.batch_end(Model(), 4)
    saver.epoch_end(Model(), 0)
    assert node.made == [(5, {}, {"step": 5, "epoch": 1})]


def test_fit_has_to_begin_where_the_checkpoint_is(tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text('{"step": 7, "epoch": 1}')
    saver = _Saver(Node(tmp_path, last_checkpoint=SimpleNamespace(folder=tmp_path)), 4)
    with pytest.raises(ConfigError, match=r"initial_epoch=checkpoint\.initial_epoch"):
        saver.epoch_begin(0, False)


def test_steps_within_epochs_that_begin_anew_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="steps would be taken twice"):
        _Saver(Node(tmp_path), 4).epoch_begin(0, True)


def test_checkpoint_of_other_means_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"was not made by sparkdl\.keras\.Checkpoint"):
        _Saver(Node(tmp_path, last_checkpoint=SimpleNamespace(folder=tmp_path)), 4)
