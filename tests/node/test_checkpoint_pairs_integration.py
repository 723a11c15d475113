"""Checkpoints beside whatever else is read: each covers the batches that the model has used.

The rows are {Keras' fit, own loop of TensorFlow, of PyTorch, Lightning, transformers}; each
pair of {one feed, a validation}, {no workers, workers}, {within an epoch, at its end} and {counted
by the caller, not counted} that is allowed comes up. The estimators' own tests save beside a
validation; `test_trainer_is_fed…` and the like kill nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from tests.doubles.labs import Lab, lab
from tests.doubles.lazy import needs
from tests.doubles.nodes import launch
from tests.doubles.until import until

pytestmark = pytest.mark.timeout(300)

NODES, BATCH, BATCHES, EPOCHS, VALIDATION = 2, 4, 5, 2, 6
ROW = {"x": [0.3, 1.0], "y": 1.0}
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

    @contextmanager
    def checkpoint(
        self, step: int, batches: int | Mapping[str, int] | None = None
    ) -> Iterator[Path]:
        with self._ctx.checkpoint(self._first + step, batches) as folder:
            (folder / f"used-{self._ctx.rank}").touch()
            used = batches_used(self._ctx, batches)
            yield folder
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


def made(nodes: Lab, body: Any, name: str, validates: bool, **how: Any) -> Used:
    """Have all nodes train by `body`, fed; return their checkpoints, by the feeds' short names."""
    nodes.begin(body, {**how, "train": name, "validates": validates})
    feedings = [nodes.cluster.feed_async(rows(BATCHES), epochs=EPOCHS, feed=name)]
    if validates:
        again = nodes.cluster.feed_async(rows(VALIDATION), epochs=EPOCHS, feed=f"a-{name}")
        feedings.append(again)
    first, *others = nodes.results()
    for feeding in feedings:
        feeding.result(60.0)
    assert [first] * len(others) == others
    return [
        (step, {"validation" if f.startswith("a-") else "train": n for f, n in used.items()})
        for step, used in first
    ]


def validation_of(args: dict[str, Any]) -> str | None:
    """Return the name of its feed, which sorts before the training's."""
    return f"a-{args['train']}" if args["validates"] else None


def expected(steps: list[int], validates: bool, is_saved_first: bool = False) -> Used:
    """Return the checkpoints after these steps of `EPOCHS` epochs that a validation follows.

    Args:
        is_saved_first: whether an epoch's end is saved before its validation.
    """
    found: Used = []
    for step in steps:
        over = (step - is_saved_first) // BATCHES * VALIDATION if validates else 0
        found.append((step, {"train": step, **({"validation": over} if over else {})}))
    return found


# TensorFlow


@pytest.fixture(scope="module")
def tensorflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("tensorflow")
    options: dict[str, Any] = {"checkpoint_dir": str(folder / "saved")}
    options["feeding"] = Feeding(timeout_s=60)
    with lab(folder, "tensorflow", NODES, **options) as found:
        yield found


def fit(args: dict[str, Any], ctx: NodeContext) -> Used:
    import tensorflow as tf

    node = Numbered(ctx)
    keras: Any = import_module("keras")
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    feed = validation_of(args)
    model.fit(
        ctx.dataset(BATCH, x="x", y="y", feed=args["train"]),
        validation_data=ctx.dataset(BATCH, x="x", y="y", feed=feed) if feed else None,
        validation_steps=args.get("validation_steps"),
        epochs=EPOCHS,
        verbose=0,
        callbacks=[sparkdl.keras.Checkpoint(node, **args["every"])],  # type: ignore[arg-type]
    )
    return node.made


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("every", "validates", "steps"),
    [
        ({"every_epochs": 1}, True, [5, 10]),
        ({"every_steps": 2}, True, [2, 4, 6, 8, 10]),
        pytest.param({"every_epochs": 1}, False, [5, 10], marks=pytest.mark.deep),
    ],
)
def test_fit_saves_beside_a_validation(
    tensorflow: Lab, every: dict[str, int], validates: bool, steps: list[int]
) -> None:
    name = f"fit-{validates}-{len(steps)}"
    found = made(tensorflow, fit, name, validates, every=every)
    assert found == expected(steps, validates, is_saved_first="every_steps" in every)


def own_loop(args: dict[str, Any], ctx: NodeContext) -> Used:
    import tensorflow as tf

    node, names = Numbered(ctx), [args["train"], validation_of(args)]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    train, *validation = (
        strategy.experimental_distribute_dataset(
            ctx.dataset(BATCH, x="x", y="y", feed=name).map(lambda x, y: (x, y)).prefetch(3)
        )
        for name in names
        if name
    )
    return loop(node, args, train, *validation)


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


def of_loop(validates: bool) -> Used:
    found = expected([3, 5, 8, 10], validates)
    return [*found[:3], *expected([10], validates, is_saved_first=True)]


@pytest.mark.tensorflow
@pytest.mark.parametrize("validates", [True, pytest.param(False, marks=pytest.mark.deep)])
def test_own_loop_over_a_dataset_saves_beside_a_validation(
    tensorflow: Lab, validates: bool
) -> None:
    how = {"refused_at": 0, "count": True}
    found = made(tensorflow, own_loop, f"own-{validates}", validates, **how)
    assert found == of_loop(validates)


# PyTorch


@pytest.fixture(scope="module")
def torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("torch")
    options: dict[str, Any] = {"checkpoint_dir": str(folder / "saved")}
    options["feeding"] = Feeding(timeout_s=60)
    with lab(folder, "torch", NODES, **options) as found:
        yield found


def own_loader(args: dict[str, Any], ctx: NodeContext) -> Used:
    from torch.utils.data import DataLoader

    return loop(
        Numbered(ctx),
        args,
        *(
            DataLoader(
                ctx.torch_dataset(BATCH, x="x", y="y", feed=name, even=True),
                batch_size=None,
                num_workers=args["workers"],
                persistent_workers=args["workers"] > 1,
            )
            for name in (args["train"], validation_of(args))
            if name
        ),
    )


@pytest.mark.torch
@pytest.mark.parametrize(
    ("workers", "validates"),
    [
        (2, True),
        (0, True),
        pytest.param(1, False, marks=pytest.mark.deep),
    ],
)
def test_own_loop_over_a_loader_saves_beside_a_validation(
    torch: Lab, workers: int, validates: bool
) -> None:
    how = {"refused_at": 0, "count": True} if workers else {}
    found = made(torch, own_loader, f"loader-{workers}", validates, workers=workers, **how)
    assert found == of_loop(validates)


def lightning(args: dict[str, Any], ctx: NodeContext) -> Used:
    import lightning.pytorch as pl

    import sparkdl.lightning
    from tests.test_lightning import QUIET, _module

    node: Any = Numbered(ctx)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        num_nodes=NODES,
        strategy="ddp",
        num_sanity_val_steps=1,
        plugins=[sparkdl.lightning.Environment()],
        callbacks=[sparkdl.lightning.Checkpoint(feed=args["train"], ctx=node, **args["every"])],
        **QUIET,
    )
    data = sparkdl.lightning.FeedDataModule(
        *(BATCH, "x", "y"),
        feed=args["train"],
        validation=validation_of(args),
        num_workers=args["workers"],
    )
    trainer.fit(_module(pl), data)
    made: Used = node.made
    return made


@pytest.mark.torch
@needs("lightning")
@pytest.mark.parametrize(
    ("every", "workers", "validates"),
    [
        ({"every_steps": 3}, 1, True),
        ({"every_epochs": 1}, 0, True),
        pytest.param({"every_epochs": 1}, 1, True, marks=pytest.mark.deep),
        pytest.param({"every_steps": 3}, 0, True, marks=pytest.mark.deep),
    ],
)
def test_lightning_saves_beside_a_validation(
    torch: Lab, every: dict[str, int], workers: int, validates: bool
) -> None:
    """The sanity check looks at rows of the validation before the training."""
    name = f"lightning-{workers}-{'every_steps' in every}"
    found = made(torch, lightning, name, validates, every=every, workers=workers)
    steps = [3, 6, 9] if "every_steps" in every else [5, 10]
    # An epoch's end is after its validation.
    assert [(step, {f: n for f, n in used.items() if n}) for step, used in found] == expected(
        steps, validates
    )


def transformers(args: dict[str, Any], ctx: NodeContext) -> Used:
    import torch as pt

    import sparkdl.transformers

    library: Any = import_module("transformers")
    node: Any = Numbered(ctx)

    class Model(pt.nn.Module):  # type: ignore[misc]  # imported late
        def __init__(self) -> None:
            super().__init__()
            self.net = pt.nn.Linear(2, 1)

        def forward(self, x: Any, labels: Any = None) -> Any:
            output = self.net(x.float())[:, 0]
            return {"loss": ((output - labels) ** 2).mean(), "logits": output}

    def collate(given: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "x": pt.stack([row["x"] for row in given]),
            "labels": pt.stack([row["y"] for row in given]),
        }

    feed = validation_of(args)
    library.Trainer(
        Model(),
        library.TrainingArguments(
            output_dir=args["folder"],
            max_steps=EPOCHS * BATCHES,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            dataloader_num_workers=args["workers"],
            remove_unused_columns=False,
            save_strategy="steps",
            save_steps=args["every"],
            eval_strategy="epoch" if feed else "no",
            report_to=[],
            logging_strategy="no",
            disable_tqdm=True,
        ),
        data_collator=collate,
        train_dataset=ctx.torch_dataset(BATCH, feed=args["train"], even=True),
        eval_dataset=ctx.torch_dataset(BATCH, feed=feed, even=True) if feed else None,
        callbacks=[sparkdl.transformers.Checkpoint(args["train"], node)],
    ).train()
    made: Used = node.made
    return made


@pytest.mark.torch
@needs("transformers")
@pytest.mark.parametrize("workers", [1, pytest.param(0, marks=pytest.mark.deep)])
def test_transformers_save_beside_a_validation(torch: Lab, workers: int, tmp_path: Path) -> None:
    how = {"folder": str(tmp_path), "workers": workers, "every": 3}
    found = made(torch, transformers, f"trainer-{workers}", True, **how)
    assert found == expected([3, 6, 9, 10], True, is_saved_first=True)


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


@pytest.mark.parametrize("is_read_by_nodes", [False, True])
def test_workers_save_beside_an_evaluator(is_read_by_nodes: bool, tmp_path: Path) -> None:
    """Its feed is no part of a checkpoint, and it saves none; files are as good as rows."""
    given: dict[int, Any] = {batches: rows(batches) for batches in (BATCHES, VALIDATION)}
    if is_read_by_nodes:
        for batches in given:
            path = str(tmp_path / f"{batches}.parquet")
            pq.write_table(pa.Table.from_pylist(given[batches]), path, row_group_size=BATCH)
            given[batches] = sparkdl.parquet(path)
    options: dict[str, Any] = {"checkpoint_dir": str(tmp_path / "saved")}
    with launch(
        worker_or_evaluator, tmp_path, NODES + 1, roles=Roles(evaluator=True), **options
    ) as cluster:
        feedings = [
            cluster.feed_async(given[BATCHES], epochs=EPOCHS),
            cluster.feed_async(given[VALIDATION], role="evaluator"),
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
