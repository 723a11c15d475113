"""What nodes run: they read one case after another, note each row, and fit a line.

Runs in: children, and the process of pytest
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from sparkdl.node.context import NodeContext
from tests.doubles.map_funs import die
from tests.ml.torch_fits import at_epochs

Model = dict[str, Any]
"""`line`: `[a, b]` of `a + b x`; `seen`: case, epoch and number of each row; `done`: how many
epochs of each case; `saved`: how many checkpoints there are."""
Chosen = dict[str, Any]
"""A case: an option's value by its name."""


def row(number: int, has: str = "") -> dict[str, Any]:
    """Return a row, all of whose columns follow from its number: those a case has, or all."""
    numbers = {"id": number, "x": number % 8 / 8, "y": number % 8 / 4 + 1}
    more = {
        "name": f"n{number}",
        "even": number % 2 == 0,
        "tokens": [number + 1] * (1 + number % 3),
    }
    words = {"words": [float(number), *[0.0] * 7, 1.0]}
    return (
        numbers | (more if has in ("many", "") else {}) | (words if has in ("vectors", "") else {})
    )


def train(plan: dict[str, Any], ctx: NodeContext) -> Model | None:
    """Read the cases of a plan, whose `files` nodes read themselves; return the model."""
    if ctx.job_name in ("ps", "evaluator"):
        threading.Event().wait()  # until the others have returned
    cases, files, saves = plan["cases"], plan["files"], plan["saves"]
    model = _resumed(ctx, len(cases))
    for number, case in enumerate(cases):
        feed, steps = f"feed-{number}", 0
        dies = plan["kills"] and number == len(cases) - 1 and ctx.generation == 0
        dies = dies and ctx.rank == ctx.num_workers - 1
        in_step = case["launch.nodes"] == 1 or case["batches.even"]
        in_step = in_step and case["feed.role"] is None
        counts = case["checkpoint.batches"] is not None
        saves_steps = saves and in_step and not files[number]
        saves_steps = saves_steps and (counts or case["data.reads"] != "dataset")  # it reads ahead
        for batches in _epochs(case, files[number] or feed, ctx, model["done"][number]):
            for element in batches:
                steps += 1
                _fit(model, number, _columns(element, case))
                ctx.report(steps, rows=len(model["seen"]))
                if dies and steps == 2:
                    die("SIGKILL")
                if saves_steps and steps % 2 == 0:
                    _save(model, ctx, {feed: steps} if counts else None)
            model["done"][number] += 1
            if saves and (in_step or not (case["batches.steps"] or case["feed.role"])):
                _save(model, ctx)  # all nodes have as many epochs
        if dies:
            die("SIGKILL")
        if saves:
            _save(model, ctx)
    return model


def _epochs(case: Chosen, feed: Any, ctx: NodeContext, done: int) -> Iterator[Any]:
    """Yield the batches of each epoch, of which some are done."""
    read = getattr(ctx, case["data.reads"] if isinstance(feed, str) else "batches")
    names = signature(read).parameters
    given = {n.removeprefix("batches."): v for n, v in case.items() if n.startswith("batches.")}
    given = {n: value for n, value in given.items() if n in names or "options" in names}
    if case["Feeding.global_batch_size"]:
        del given["batch_size"]
    if given.get("columns") and given["pad"]:
        given["columns"] = [*given["columns"], *given["pad"]]
    if not isinstance(feed, str):
        yield from [read(feed=feed, **given)] * (case["feed.epochs"] - done)
        return
    opened: list[Any] = []  # once there are rows, for which some wait
    while ctx.has_epoch(feed):
        opened = opened or [read(feed=feed, **given)]
        yield opened[0]


def _columns(element: Any, case: Chosen) -> dict[str, Any]:
    """Return what a data set gives as columns: dicts, or `x`, `y` and weights."""
    parts = list(element) if isinstance(element, (list, tuple)) else [element]
    found = {name: _array(column) for name, column in parts.pop(0).items()}
    if case.get("batches.y"):
        found["y"] = np.asarray(parts.pop(0))
    return found | ({"sample_weight": np.asarray(parts[0])} if parts else {})


def _array(column: Any) -> Any:
    """Return a tensor or a `csr_array` as an array."""
    if type(column).__name__ == "SparseTensor":
        import tensorflow as tf

        column = tf.sparse.to_dense(column)
    ways = (getattr(column, name, None) for name in ("toarray", "to_dense", "todense"))
    return np.asarray(next((way() for way in ways if way), column))


def _fit(model: Model, case: int, batch: dict[str, Any]) -> None:
    """Note the rows of a batch, all columns of which must be theirs, and take a step."""
    weights = batch.pop("sample_weight", np.ones(len(batch["id"])))
    numbers = [int(number) for number in batch["id"][weights > 0]]
    for place, number in enumerate(numbers):
        wanted, found = row(number), {name: column[place] for name, column in batch.items()}
        length, mask = found.pop("tokens.length", None), found.pop("tokens.mask", None)
        if mask is not None:
            assert length == len(wanted["tokens"]), f"{number}: {length}"
            found["tokens"] = found["tokens"][mask]
        for name, value in found.items():
            text = value.decode() if isinstance(value, bytes) else value
            assert np.array_equal(text, wanted[name]), f"{name} of {number}: {value}"
    model["seen"] += [[case, model["done"][case], number] for number in numbers]
    if not numbers:
        return
    x, y = (np.array([row(number)[name] for number in numbers]) for name in "xy")
    off = at(model, x) - y
    model["line"][0] -= 0.2 * float(off.mean())
    model["line"][1] -= 0.2 * float((off * x).mean())


def at(model: Model, x: Any) -> Any:
    return model["line"][0] + model["line"][1] * x


def _save(model: Model, ctx: NodeContext, batches: Any = None) -> None:
    model["saved"] += 1
    with ctx.checkpoint(model["saved"], batches) as folder:
        (folder / f"part-{ctx.rank}.json").write_text(json.dumps(model))


def _resumed(ctx: NodeContext, cases: int) -> Model:
    """Return the model of the last checkpoint; the first node goes on with the rows of all."""
    if ctx.last_checkpoint is None:
        return {"line": [0.0, 0.0], "seen": [], "done": [0] * cases, "saved": 0}
    parts = parts_in(ctx.last_checkpoint.folder)
    seen = [each for part in parts for each in part["seen"]] if ctx.rank == 0 else []
    return {**parts[ctx.rank], "seen": seen}


def parts_in(folder: Path) -> list[Model]:
    """Return what the nodes have saved, by rank."""
    return [json.loads(part.read_text()) for part in sorted(folder.glob("part-*.json"))]


def scorer(has_shape: bool, has_two: bool) -> Any:
    """Return what `predict` calls."""

    def score(columns: dict[str, Any]) -> dict[str, Any]:
        out = 2 * columns["x"] + 1
        if "flat" in columns:
            assert columns["flat"].shape[1:] == ((2, 2) if has_shape else (4,))
            out = out + columns["flat"].reshape(len(out), 4).sum(1)
        assert all(name.startswith("n") for name in columns.get("name", ()))
        return {"out": out, "twice": np.stack([out, out], 1)} if has_two else {"out": out}

    return score


def plane(kind: str) -> Any:
    """Make a model of two features for an estimator."""
    if kind == "torch":
        import torch

        return torch.nn.Linear(2, 1)
    import keras

    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def dying(kind: str, marker: Path) -> list[Any]:
    """Return a callback that kills the first process that ends the second epoch."""

    def end(epoch: int, _: Any) -> None:
        if epoch == 1:
            with suppress(FileExistsError):
                marker.touch(exist_ok=False)
                die("SIGKILL")

    if kind == "torch":
        return at_epochs(end)
    import keras

    return [keras.callbacks.LambdaCallback(on_epoch_end=end)]
