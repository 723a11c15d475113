"""The options of the public functions, values worth trying of each, and which exclude each other.

A new option of a signature belongs into a table, or into `EXCLUDED` with the reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pyspark.ml.param import Param

import sparkdl
from sparkdl.ml.jobs import fit
from tests.pairs.covering import Case

Values = Mapping[str, tuple[Any, ...]]
OBJECTS = {"roles": sparkdl.Roles, "recovery": sparkdl.Recovery, "feeding": sparkdl.Feeding}
OBJECTS |= {"observe": sparkdl.Observe, "startup": sparkdl.Startup}
_CTX = sparkdl.NodeContext
_OWNERS: Mapping[str, tuple[Callable[..., Any], ...]] = {
    **{kind.__name__: (kind,) for kind in OBJECTS.values()},
    **{"launch": (sparkdl.launch,), "feed": (sparkdl.Cluster.feed, sparkdl.Cluster.feed_async)},
    "batches": (_CTX.batches, _CTX.dataset, _CTX.torch_dataset, _CTX.jax_batches, _CTX.hf_dataset),
    **{"checkpoint": (_CTX.checkpoint,), "predict": (sparkdl.predict,)},
    "fit": (sparkdl.TorchEstimator, sparkdl.KerasEstimator),
}
NUMBERS = ["id", "x", "y"]

# The first value of an option is its default. "folder" stands for one of the test's.
# fmt: off
LAUNCH: Values = {
    "launch.framework": ("plain",), "launch.executor": ("local",), "launch.nodes": (2, 1),
    "launch.num_gpus": (None, 0), "launch.max_restarts": (0, 1),
    "launch.checkpoint_dir": (None, "folder"), "Roles.ps": (0, 1), "Roles.chief": (None, "chief"),
    "Roles.evaluator": (False, True), "Roles.coordinator": (None, False),
    "Roles.ps_on_driver": (False, True), "Roles.independent_models": (False, True),
    "Recovery.min_nodes": (None, 1), "Recovery.wait_s": (60.0, 30.0),
    "Recovery.host_timeout_s": (8.0, 4.0), "Recovery.hang_timeout_s": (600.0, None),
    "Recovery.on_hang": ("report", "fail"), "Recovery.keep_checkpoints": (3, 1),
    "Feeding.fed": (True, False), "Feeding.timeout_s": (600.0, 60.0),
    "Feeding.memory_nbytes": (None, 1024), "Feeding.disk_nbytes": (None, 0),
    "Feeding.global_batch_size": (None, 12),
    "Observe.dashboard": (None, False), "Observe.record": (None, "folder"),
    "Observe.log_to_driver": (None, True), "Observe.on_log": (None, print),
    "Observe.on_report": (None, print), "Observe.progress": (None, True),
    "Startup.timeout_s": (600.0, 60.0), "Startup.placement": ("auto", "attached", "detached"),
    "Startup.preload": ((), ("json", "csv")), "Startup.release_port": (True, False),
    "Startup.tls": (None, True),
}
"""`nodes` train; with `max_restarts` one of them is killed."""
FEED: Values = {
    "data.reads": ("batches", "own files"), "data.columns": ("numbers", "many", "vectors"),
    "data.source": ("rows", "iterator", "table", "tables", "pandas", "parquet", "named parquet"),
    "data.call": ("feed", "feed_async"),
    "feed.epochs": (2, 1, 3), "feed.timeout_s": (None, 60.0), "feed.role": (None, "worker"),
    "feed.reader": ("auto", "nodes", "spark"), "feed.shuffle": (None, "global"),
    "feed.seed": (0, 7),
    "batches.batch_size": (4, 1, 100), "batches.columns": (None, NUMBERS),
    "batches.even": (None, True, False), "batches.tail": ("short", "pad", "drop"),
    "batches.shuffle": (False, True, 5), "batches.seed": (0, 7), "batches.steps": (None, 3),
    "batches.pad": (None, {"tokens": None}, {"tokens": 6}),
    "batches.sparse": ((), ["words"]), "checkpoint.batches": (None, "counted"),
}
_XY: Values = {"batches.x": (None, ["id", "x"]), "batches.y": (None, "y")}
SETS: Mapping[str, Values] = {
    "torch": {**_XY, "data.reads": ("torch_dataset", "batches")},
    "tensorflow": {**_XY, "data.reads": ("dataset", "batches")},
    "jax": {**_XY, "data.reads": ("jax_batches", "batches"), "batches.prefetch": (2, 0)},
}
"""What the data sets of frameworks take besides."""
SPARK: Values = {
    "launch.executor": ("spark",), "data.reads": ("batches",),
    "data.source": ("rdd", "frame", "scan", "table"), "batches.even": (None, True),
    "batches.tail": ("short", "pad"),
}
FEW: Values = {
    "launch.max_restarts": (1,), "launch.checkpoint_dir": ("folder",), "feed.epochs": (2, 1),
    "batches.batch_size": (4, 100), "batches.shuffle": (False, True), "batches.seed": (0,),
    "batches.pad": (None, {"tokens": 6}),
}
"""Fewer, where a launch takes long."""
PREDICT: Values = {
    "data.nulls": (False, True), "data.parts": (3, 1),
    "predict.input_cols": (["x"], ["x", "flat"], ["x", "name"]),
    "predict.schema": ("out double", "out float, twice array<double>"),
    "predict.batch_size": (1024, 1, 7), "predict.input_shapes": (None, {"flat": [2, 2]}),
    "predict.keep": (True, False, ["id"]), "predict.handle_invalid": ("error", "skip", "keep"),
    "predict.model_per": ("auto", "slot"), "predict.error_col": (None, "why"),
}
_FIT: Values = {
    "fit.sparse": ([],), "fit.num_workers": (1, 2), "fit.epochs": (6, 4), "fit.seed": (None, 7),
    "fit.batch_size": (8, 100, 3), "fit.features_col": ("x", ["a", "b"]),
    "fit.label_col": ("y", ["y"]), "fit.weight_col": (None, "w"), "fit.shuffle": (True, False),
    "fit.validation_indicator_col": (None, "held"), "fit.max_restarts": (0, 1),
    "fit.checkpoint_dir": (None, "folder"), "fit.model_dir": (None, "folder"),
    "fit.keep": (True, False, ["id"]), "fit.handle_invalid": ("error", "skip", "keep"),
    "fit.prediction_col": ("prediction", "score"), "fit.model_per": ("auto", "slot"),
    "fit.output_types": ({}, {"prediction": "double"}), "fit.num_gpus": (None, 0),
    "fit.feeding": (None, sparkdl.Feeding(memory_nbytes=4096)), "fit.optimizer": ("sgd", "adam"),
    "fit.recovery": (None, sparkdl.Recovery(keep_checkpoints=1)),
    "fit.startup": (None, sparkdl.Startup(tls=True)),
    "fit.observe": (None, sparkdl.Observe(progress=True)),
}
FITS: Mapping[str, Values] = {
    "torch": {**_FIT, "fit.loss": ("MSELoss", "L1Loss"), "fit.metrics": (None, {"a": "accuracy"}),
              "fit.trainer_args": ({}, {"gradient_clip_val": 5.0})},
    "keras": {**_FIT, "fit.loss": ("mse", "mae"), "fit.metrics": (None, ["mae"]),
              "fit.mode": ("nodes", "jobs")},
}
DEEP: Values = {
    "launch.nodes": (2, 1, 3), "feed.epochs": (2, 1, 3, 7), "batches.batch_size": (4, 1, 100, 5),
    "batches.shuffle": (False, True, 5, 1), "batches.steps": (None, 3, 1, 50),
    "Feeding.memory_nbytes": (None, 1024, 1, 1 << 20), "Feeding.disk_nbytes": (None, 0, 1 << 20),
    "Recovery.hang_timeout_s": (600.0, None, 60.0), "Startup.tls": (None, True, False),
    "Observe.log_to_driver": (None, True, False), "Observe.progress": (None, True, False),
}

EXCLUDED = {
    "spark map_fun args frame make model params data self": "the case itself",
    "roles recovery feeding observe startup": "each of their fields is an option",
    "feed step": "each case has a feed of its own, and steps must grow",
    "tensorboard": "it takes seconds to import; its own tests start it",
    "options": "of data sets: those of ctx.batches",
    "mesh data_axis sharding": "of worlds of PyTorch and JAX: tests/frameworks",
    "sparse": "of predict: tests/ml/estimators/test_sparse_integration.py",
    "checkpoint key group_by_length": "of predict: tests/ml/scoring",
    "callbacks": "with max_restarts one kills a node",
    "probability_col raw_prediction_col": "of classifiers",
    "input_mapping output_mapping input_shapes loss_weights custom_objects": "of several inputs",
}
"""Options that no case varies, and why."""
_VECTORS = ("rows", "table", "tables", "parquet")
_FILES = ("parquet", "named parquet", "scan")
_OF_FEED = (
    *("data.call", "feed.timeout_s", "feed.role", "feed.reader", "feed.shuffle", "feed.seed"),
)
_OF_NODES = tuple(f"fit.{name}" for name in fit._NODES_ONLY)
_RULES: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("Feeding.fed data.reads", lambda fed, reads: not fed and reads != "own files"),
    ("data.reads data.source", lambda reads, of: reads == "own files" and of not in _FILES),
    ("data.reads batches.steps", lambda reads, steps: reads == "own files" and steps),
    *((f"data.reads {name}", lambda reads, value, name=name:
       reads == "own files" and value != FEED[name][0]) for name in _OF_FEED),
    ("Feeding.global_batch_size data.reads", lambda size, reads: size and reads == "own files"),
    ("Feeding.global_batch_size Feeding.fed", lambda size, fed: size and not fed),
    ("Feeding.global_batch_size batches.shuffle", lambda size, mixes: size and mixes),
    ("Feeding.global_batch_size feed.role", lambda size, role: size and role),
    ("Feeding.global_batch_size Feeding.disk_nbytes", lambda size, disk: size and disk == 0),
    ("Feeding.global_batch_size feed.seed", lambda size, seed: seed and not size),
    ("feed.shuffle feed.seed", lambda shuffle, seed: seed and not shuffle),
    ("data.source feed.epochs", lambda source, epochs: source == "iterator" and epochs > 1),
    ("data.source launch.max_restarts", lambda source, many: source == "iterator" and many),
    ("data.source feed.reader", lambda of, by: by == "spark" and of in _FILES[:2]),
    ("data.source feed.reader", lambda of, by: by == "nodes" and of not in _FILES),
    ("data.columns batches.pad", lambda columns, pad: pad and columns != "many"),
    ("data.columns batches.sparse", lambda columns, names: names and columns != "vectors"),
    ("data.columns data.source", lambda columns, of: columns == "vectors" and of not in _VECTORS),
    ("batches.sparse batches.columns", lambda sparse, columns: sparse and columns),
    ("batches.sparse batches.x", lambda sparse, x: sparse and x),
    ("launch.checkpoint_dir checkpoint.batches", lambda folder, count: count and not folder),
    ("Roles.chief launch.nodes feed.role", lambda chief, nodes, to: chief and nodes == 1 and to),
    ("batches.x batches.y", lambda x, y: y and not x),
    ("batches.x data.reads", lambda x, reads: x and reads == "batches"),
    ("batches.x batches.pad", lambda x, pad: x and pad),
    ("batches.prefetch data.reads", lambda many, reads: many != 2 and reads == "batches"),
    ("batches.x data.reads data.columns batches.pad batches.columns",  # any length; JAX has no text
     lambda x, reads, has, pad, columns: reads != "batches" and has == "many"
     and not (x or columns or (pad and reads != "jax_batches"))),
    ("predict.input_cols predict.input_shapes", lambda names, of: of and "flat" not in names),
    ("fit.prediction_col fit.output_types", lambda name, of: of and name not in of),
    *((f"fit.mode {name}", lambda mode, value, name=name:
       mode == "jobs" and value != _FIT[name][0]) for name in _OF_NODES),
    ("data.nulls predict.handle_invalid", lambda nulls, how: nulls and how == "error"),
)
# fmt: on


def allowed_of(values: Values) -> Callable[[Case], bool]:
    """Return whether no rule forbids a case, or the part of one that is chosen so far."""
    rules = [(names.split(), forbids) for names, forbids in _RULES]

    def is_allowed(case: Case) -> bool:
        return not any(
            forbids(*(values[name][case[name]] for name in names))
            for names, forbids in rules
            if case.keys() >= set(names)
        )

    return is_allowed


def unknown_options() -> Iterator[str]:
    """Yield the options of signatures, and parameters of Spark ML, that no table knows."""
    tables = (LAUNCH, FEED, *SETS.values(), PREDICT, *FITS.values())
    known, excluded = {name for table in tables for name in table}, set(" ".join(EXCLUDED).split())
    for owner, functions in _OWNERS.items():
        for each in functions:
            params = [name for name in dir(each) if isinstance(getattr(each, name), Param)]
            names = {*inspect.signature(each).parameters, *params} - excluded
            yield from sorted({f"{owner}.{name}" for name in names} - known)
