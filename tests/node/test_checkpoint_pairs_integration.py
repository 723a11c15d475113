"""Checkpoints beside whatever else is read: each covers the batches that the model has used.

Keras' fit, own loops of TensorFlow and of PyTorch each read a validation as well, and save within
epochs and at their ends. Those of Lightning, transformers and the estimators save beside one where
nodes are killed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparkdl
from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Feeding, Roles
from sparkdl.node.context import NodeContext
from tests.doubles.labs import Lab, lab_of
from tests.doubles.nodes import launch
from tests.doubles.until import until

pytestmark = pytest.mark.timeout(300)

NODES, BATCH, BATCHES, EPOCHS, VALIDATION = 2, 4, 5, 2, 6
ROW = {"x": [0.3, 1.0], "y": 1.0}
Batches = int | Mapping[str, int] | None
Used = list[tuple[int, dict[str, int]]]
"""The step of each checkpoint, and the batches of each feed that it covers."""


class Numbered:
    """A node's context whose steps grow from one function of the lab to the next.

    Attributes:
        made: the checkpoints so far.
    """

    def __init__(self, ctx: NodeContext) -> None:
        self._ctx, last = ctx, ctx._checkpoints._last_step
        self._first = 0 if last is None else last + 1
        self._before = ctx.batches_given()
        self.made: Used = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def checkpoint(self, step: int, batches: Batches = None) -> AbstractContextManager[Path]:
        return self._noted(self._ctx.checkpoint, step, batches)

    def checkpoint_async(self, step: int, batches: Batches = None) -> AbstractContextManager[Any]:
        return self._noted(self._ctx.checkpoint_async, step, batches)

    @contextmanager
    def _noted(self, begin: Any, step: int, batches: Batches) -> Iterator[Any]:
        with begin(self._first + step, batches) as made:
            (getattr(made, "folder", made) / f"used-{self._ctx.rank}").touch()
            used = batches_used(self._ctx, batches)
            yield made
        new = {feed: n for feed, n in used.items() if feed not in self._before}
        self.made.append((step, new))


def batches_used(ctx: NodeContext, batches: Any) -> dict[str, int]:
    feeds, used = ctx._link.feeds, {}
    for feed, count in feeds._asked(batches).items():
        reader = feeds._readers[feed]
        given = reader._cursor.consumed.used() if count is None else count
        used[feed] = min(given, reader.steps)
    return used


def rows(batches: int) -> list[dict[str, Any]]:
    return [ROW] * (NODES * BATCH * batches)


def made(nodes: Lab, body: Any, name: str, **how: Any) -> Used:
    """Have all nodes train by `body`, fed; return their checkpoints, by the feeds' short names."""
    validation = f"a-{name}"  # which sorts before the training's
    nodes.begin(body, {**how, "train": name, "validation": validation})
    feedings = [
        nodes.cluster.feed_async(rows(BATCHES), epochs=EPOCHS, feed=name),
        nodes.cluster.feed_async(rows(VALIDATION), epochs=EPOCHS, feed=validation),
    ]
    first, *others = nodes.results()
    for feeding in feedings:
        feeding.result(60.0)
    assert [first] * len(others) == others
    return [
        (step, {"validation" if f == validation else "train": n for f, n in used.items() if n})
        for step, used in first
    ]


def expected(*steps: int, saved_first: tuple[int, ...] = ()) -> Used:
    """Return the checkpoints after these steps of `EPOCHS` epochs that a validation follows.

    Args:
        saved_first: the steps that are saved before the validation behind them.
    """
    found: Used = []
    for step in steps:
        over = (step - (step in saved_first)) // BATCHES * VALIDATION
        found.append((step, {"train": step, **({"validation": over} if over else {})}))
    return found


tensorflow = lab_of("tensorflow", NODES, saves=True, feeding=Feeding(timeout_s=60))
torch = lab_of("torch", NODES, saves=True, feeding=Feeding(timeout_s=60))


# TensorFlow


def fit(args: dict[str, Any], ctx: NodeContext) -> Used:
    import tensorflow as tf

    node = Numbered(ctx)
    keras: Any = import_module("keras")
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    checkpoint = sparkdl.keras.Checkpoint(node, every_steps=2, every_epochs=1)  # type: ignore[arg-type]
    model.fit(
        ctx.dataset(BATCH, x="x", y="y", feed=args["train"]),
        validation_data=ctx.dataset(BATCH, x="x", y="y", feed=args["validation"]),
        epochs=EPOCHS,
        verbose=0,
        callbacks=[checkpoint],
    )
    return node.made


@pytest.mark.deep
@pytest.mark.tensorflow
def test_fit_saves_beside_a_validation(tensorflow: Lab) -> None:
    """A multiple of the steps is saved before the validation, another end of an epoch after it."""
    found = made(tensorflow, fit, "fit")
    assert found == expected(2, 4, 5, 6, 8, 10, saved_first=(10,))


def own_loop(args: dict[str, Any], ctx: NodeContext) -> Used:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    train, validation = (
        strategy.experimental_distribute_dataset(
            ctx.dataset(BATCH, x="x", y="y", feed=args[name]).map(lambda x, y: (x, y)).prefetch(3)
        )
        for name in ("train", "validation")
    )
    return loop(Numbered(ctx), args, train, validation)


def loop(node: Any, args: dict[str, Any], train: Any, validation: Any = ()) -> Used:
    """Save within each epoch by a count, and at its end without, before and after a validation."""
    step = 0
    for epoch in range(EPOCHS):
        for number, _ in enumerate(train):
            step += 1
            if number == args.get("refused_at"):
                with pytest.raises(ConfigError, match="Pass batches="), node.checkpoint(step):
                    pass
            if number == 2:
                with node.checkpoint(step, {args["train"]: step} if "count" in args else None):
                    pass
        if epoch:
            with node.checkpoint(step):
                pass
        for _ in validation:
            pass
        if not epoch:
            with node.checkpoint(step):
                pass
    made: Used = node.made
    return made


OF_LOOP = expected(3, 5, 8, 10, saved_first=(10,))


@pytest.mark.deep
@pytest.mark.tensorflow
def test_own_loop_over_a_dataset_saves_beside_a_validation(tensorflow: Lab) -> None:
    assert made(tensorflow, own_loop, "own", refused_at=0, count=True) == OF_LOOP


# PyTorch


def own_loader(args: dict[str, Any], ctx: NodeContext) -> Used:
    from torch.utils.data import DataLoader

    return loop(
        Numbered(ctx),
        args,
        *(
            DataLoader(
                ctx.torch_dataset(BATCH, x="x", y="y", feed=args[name], even=True),
                batch_size=None,
                num_workers=args["workers"],
                persistent_workers=args["workers"] > 1,
            )
            for name in ("train", "validation")
        ),
    )


@pytest.mark.torch
@pytest.mark.parametrize("workers", [2, 0])
def test_own_loop_over_a_loader_saves_beside_a_validation(torch: Lab, workers: int) -> None:
    how = {"refused_at": 0, "count": True} if workers else {}
    assert made(torch, own_loader, f"loader-{workers}", workers=workers, **how) == OF_LOOP


# Any framework, an evaluator beside it


def worker_or_evaluator(folder: Path, ctx: NodeContext) -> Used | None:
    if ctx.job_name != "evaluator":
        found = loop(Numbered(ctx), {"train": "input"}, ctx.batches(BATCH))
        assert until((folder / "refusal").exists, 30.0)
        return found
    assert sum(len(batch["x"]) for batch in ctx.batches(BATCH)) == len(rows(VALIDATION))
    with pytest.raises(ConfigError) as refusal, ctx.checkpoint(1):
        pass
    (folder / "draft").write_text(str(refusal.value))
    (folder / "draft").rename(folder / "refusal")  # an evaluator returns no value
    return None


def test_workers_save_beside_an_evaluator(tmp_path: Path) -> None:
    """Its feed is no part of a checkpoint, and it saves none; files are as good as rows."""
    path = str(tmp_path / "rows.parquet")
    pq.write_table(pa.Table.from_pylist(rows(BATCHES)), path, row_group_size=BATCH)
    options: dict[str, Any] = {"checkpoint_dir": str(tmp_path / "saved")}
    with launch(
        worker_or_evaluator, tmp_path, NODES + 1, roles=Roles(evaluator=True), **options
    ) as cluster:
        feedings = [
            cluster.feed_async(sparkdl.parquet(path), epochs=EPOCHS),
            cluster.feed_async(rows(VALIDATION), role="evaluator"),
        ]
        for feeding in feedings:
            feeding.result(60.0)
        *workers, _refusal = cluster.results(60.0)
    used = [(step, {"input": step}) for step in (3, 5, 8, 10)]
    assert workers == [used] * NODES
    assert (
        "evaluator:0 does not train: call ctx.checkpoint on chief and workers"
        in (tmp_path / "refusal").read_text()
    )
