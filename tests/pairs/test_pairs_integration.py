"""Each pair of options comes up: rows, loss and model are right, or it is refused at once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession

import sparkdl
from sparkdl.core.errors import ConfigError
from sparkdl.ml.jobs import fit
from sparkdl.node.checkpoint_store import open_store
from tests.doubles.feeds import vectors
from tests.doubles.map_funs import wait_for_end
from tests.doubles.nodes import launch
from tests.ml.torch_fits import weights_of
from tests.pairs import options
from tests.pairs.covering import Case, cover
from tests.pairs.options import FEED, FEW, FITS, LAUNCH, NUMBERS, OBJECTS, PREDICT, SETS, Values
from tests.pairs.programs import Chosen, Model, at, dying, parts_in, plane, row, scorer, train

pytestmark = pytest.mark.timeout(240)
ROWS, WAIT_S = 24, 100.0
LOCAL = {**FEED, **LAUNCH}
DEFAULTS = {name: values[:1] for name, values in LAUNCH.items()}
ON_SPARK = {**FEED, **DEFAULTS, **FEW, **options.SPARK}
OF = {
    kind: {**FEED, **DEFAULTS, **FEW, **own, "launch.framework": (kind,)}
    for kind, own in SETS.items()
}


def cases_of(
    values: Values, starts: Sequence[Case] = (), random: Random | None = None
) -> list[Case]:
    sizes = {name: len(each) for name, each in values.items()}
    return cover(sizes, options.allowed_of(values), starts, random)


def clusters(values: Values, random: Random | None = None) -> list[list[Chosen]]:
    """Return cases that have all pairs; those of one launch, which take turns in it, together."""
    names = sorted(LAUNCH, key=lambda name: -len(values[name]))
    launches = cases_of({name: values[name] for name in names}, random=random)
    found = defaultdict[str, list[Chosen]](list)
    for case in cases_of(values, launches, random):
        chosen = {name: values[name][place] for name, place in case.items()}
        found[str([chosen[name] for name in names])].append(chosen)
    return list(found.values())


def run_all(values: Values, folder: Path, random: Random | None = None, spark: Any = None) -> None:
    for number, cases in enumerate(clusters(values, random)):
        run(cases, folder / str(number), values, spark)


def of(owner: str, chosen: Chosen, folder: Path) -> dict[str, Any]:
    """Return the options of one function."""
    found = {n.partition(".")[2]: v for n, v in chosen.items() if n.startswith(f"{owner}.")}
    return {n: str(folder / n) if value == "folder" else value for n, value in found.items()}


def shown(chosen: Chosen, values: Values) -> str:
    return str({name: value for name, value in chosen.items() if value != values[name][0]})


def data_of(chosen: Chosen, folder: Path, spark: Any) -> Any:
    rows = [row(number, chosen["data.columns"]) for number in range(ROWS)]
    table, source = pa.Table.from_pylist(rows), chosen["data.source"]
    if chosen["data.columns"] == "vectors":
        rows = [{**each, "words": Vectors.dense(each["words"])} for each in rows]
        table = table.set_column(table.num_columns - 1, "words", vectors(0, ROWS, 9)["x"])
    folder.mkdir(parents=True)
    for part in range(2):
        pq.write_table(table[12 * part : 12 * part + 12], folder / f"{part}.parquet", 5)
    names = NUMBERS + ["tokens"] * bool(chosen["batches.pad"])
    made = {
        **{"rows": lambda: rows, "iterator": lambda: iter(rows), "table": lambda: table},
        **{"tables": lambda: [table[:9], table[9:10], table[10:]], "pandas": table.to_pandas},
        "parquet": lambda: sparkdl.parquet(str(folder)),
        "named parquet": lambda: sparkdl.parquet(str(folder), names),
        "rdd": lambda: spark.sparkContext.parallelize(rows, 3),
        "frame": lambda: spark.createDataFrame(table.to_pandas()).repartition(3),
        "scan": lambda: spark.read.parquet(str(folder)),
    }
    return made[source]()


def run(cases: list[Chosen], folder: Path, values: Values, spark: Any = None) -> None:
    """Launch a cluster as all cases say, which reads them one after another; check what it did."""
    given = of("launch", cases[0], folder)
    given |= {name: kind(**of(kind.__name__, cases[0], folder)) for name, kind in OBJECTS.items()}
    given["nodes"] += given["roles"].ps + given["roles"].evaluator
    data = [data_of(case, folder / f"data-{n}", spark) for n, case in enumerate(cases)]
    are_own = [case["data.reads"] == "own files" for case in cases]
    files = [rows if is_own else None for rows, is_own in zip(data, are_own, strict=True)]
    plan = {"cases": cases, "files": files, "saves": given["checkpoint_dir"] is not None}
    plan["kills"] = given["max_restarts"] > 0
    reports: list[Any] = [None] * len(cases)
    with sparkdl.launch(spark, train, plan, **given) as cluster:
        for number, case in enumerate(cases):
            how = {**of("feed", case, folder), "feed": f"feed-{number}"}
            if case["data.call"] == "feed_async":
                reports[number] = cluster.feed_async(data[number], **how).result(WAIT_S)
            elif not are_own[number]:
                reports[number] = cluster.feed(data[number], **how)
            cluster.end_feeds(how["feed"])
        models = [model for model in cluster.results(WAIT_S) if model is not None]
    for number, (case, report) in enumerate(zip(cases, reports, strict=True)):
        wrong = list(wrong_rows(case, number, models, report))
        assert not wrong, f"{wrong} {shown(case, values)} {report}"
    x, y = np.arange(8) / 8, np.arange(8) / 4 + 1
    for model in models:
        loss = ((at(model, x) - y) ** 2).mean()
        assert loss < (y**2).mean() or model["line"] == [0.0, 0.0], model["line"]
    if plan["saves"]:
        complete = [e for e in open_store(given["checkpoint_dir"]).entries() if e.is_complete]
        # The one that a restart has begun at stays besides.
        assert len(complete) <= max(2, given["recovery"].keep_checkpoints) + plan["kills"]
        newest = max(complete, key=lambda each: each.name)
        assert [part["line"] for part in parts_in(Path(newest.path))] == [m["line"] for m in models]


def wrong_rows(case: Chosen, number: int, models: list[Model], report: Any) -> Iterator[str]:
    """Yield what is wrong with the rows of a case: each comes once an epoch."""
    by_epoch = defaultdict[int, Counter[int]](Counter)
    for case_of, epoch, found in (each for model in models for each in model["seen"]):
        if case_of == number:
            by_epoch[epoch][found] += 1
    got = sum(by_epoch.values(), Counter[int]())
    wanted = Counter(dict.fromkeys(range(ROWS), case["feed.epochs"]))
    lost, doubled = (wanted - got).total(), (got - wanted).total()
    tail, is_even = case["batches.tail"], case["batches.even"]
    is_even = case["launch.framework"] != "plain" if is_even is None else is_even
    if (lost and tail != "drop") or (doubled and not (is_even and tail == "short")):
        yield f"{lost} rows are lost, {doubled} came twice"
    if case["launch.max_restarts"]:
        return  # the report counts since the restart, and the rest of an epoch is one
    if report is not None and lost != report.rows_dropped + report.rows_unused:
        yield f"{lost} rows are lost"
    if report is not None and tail != "pad" and doubled != report.rows_padded:
        yield f"{doubled} rows came twice"
    fewest = min(map(len, by_epoch.values()), default=0)
    if fewest < ROWS and tail != "drop" and not case["batches.steps"]:
        yield f"an epoch has {fewest} rows"


@pytest.mark.parametrize("cases", clusters(LOCAL), ids=len)
def test_nodes_without_a_framework(cases: list[Chosen], tmp_path: Path) -> None:
    run(cases, tmp_path, LOCAL)


def test_rows_of_spark(spark_local: SparkSession, tmp_path: Path) -> None:
    run_all(ON_SPARK, tmp_path, spark=spark_local)


@pytest.mark.torch
def test_nodes_of_pytorch(tmp_path: Path) -> None:
    run_all(OF["torch"], tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=getattr(pytest.mark, kind)) for kind in ("tensorflow", "jax")]
)
def test_nodes_of_other_frameworks(kind: str, tmp_path: Path) -> None:
    run_all(OF[kind], tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(8))
def test_more_values_and_triples(seed: int, tmp_path: Path) -> None:
    run_all({**LOCAL, **options.DEEP}, tmp_path, Random(seed))


@pytest.mark.parametrize("case", cases_of(PREDICT))
def test_predict(spark_local: SparkSession, case: Case, tmp_path: Path) -> None:
    chosen = {name: PREDICT[name][place] for name, place in case.items()}
    null = "id % 5 = 3" if chosen["data.nulls"] else "false"
    frame = spark_local.range(ROWS, numPartitions=chosen["data.parts"]).selectExpr(
        *("id", f"if({null}, null, id / 8) as x", "array(id, id, id, 2 * id) as flat"),
        "concat('n', id) as name",
    )
    given = of("predict", chosen, tmp_path)
    make = partial(scorer, given["input_shapes"] is not None, "twice" in given["schema"])
    scored = sparkdl.predict(frame, make, **given)
    kept = frame.columns if given["keep"] is True else given["keep"] or []
    has = {"twice": "twice" in given["schema"], "why": given["error_col"]}
    assert scored.columns == [*kept, "out", *(name for name, there in has.items() if there)]
    wanted = {n: n / 4 + 1 + 5 * n * ("flat" in given["input_cols"]) for n in range(ROWS)}
    nulls = {n: None for n in wanted if chosen["data.nulls"] and n % 5 == 3}
    result = {
        n: v
        for n, v in (wanted | nulls).items()
        if given["handle_invalid"] != "skip" or n not in nulls
    }
    rows = scored.collect()
    assert not [each.why for each in rows if given["error_col"] and each.why]
    assert Counter(each.out for each in rows) == Counter(result.values()), shown(chosen, PREDICT)
    assert all(result[each.id] == each.out for each in rows if kept), shown(chosen, PREDICT)


FIT_CASES = [
    pytest.param(kind, case, marks=getattr(pytest.mark, mark))
    for kind, mark in (("torch", "torch"), ("keras", "tensorflow"))
    for case in cases_of(FITS[kind])
]


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "case"), FIT_CASES)
def test_estimator_fits_and_its_model_is_saved_and_scores(
    spark_ml: SparkSession, kind: str, case: Case, tmp_path: Path
) -> None:
    estimator = {"torch": sparkdl.TorchEstimator, "keras": sparkdl.KerasEstimator}[kind]
    chosen = {name: FITS[kind][name][place] for name, place in case.items()}
    given, about = of("fit", chosen, tmp_path), shown(chosen, FITS[kind])
    callbacks = partial(dying, kind, tmp_path / "died") if given["max_restarts"] else ()
    if given.get("mode") == "jobs":  # which refuses these, whatever their value
        given = {name: value for name, value in given.items() if name not in fit._NODES_ONLY}
    frame = spark_ml.range(40, numPartitions=3).selectExpr(
        *("id", "id % 5 / 5 as a", "id % 7 / 7 as b", "1.0d + id % 2 as w", "id % 4 = 0 as held")
    )
    frame = frame.selectExpr("*", "array(a, b) as x", "1 + a + 2 * b as y")
    fitted = estimator(partial(plane, kind), callbacks=callbacks, **given).fit(frame)
    losses, feed = fitted.history["loss"], fitted.summary.feed
    assert all(map(isfinite, losses)), f"{losses} {about}"
    assert losses[-1] < losses[0], f"{losses} {about}"
    rows = given["epochs"] * (40 if given["validation_indicator_col"] is None else 30)
    assert feed is None or feed.rows_used == rows, f"{feed} {about}"
    trained = fitted.getModel()
    weight, bias = trained.get_weights() if kind == "keras" else weights_of(trained)
    wanted = sorted(np.array(frame.select("a", "b").collect()) @ weight.reshape(2) + bias)
    fitted.save(str(tmp_path / "saved"))
    kept = frame.columns if given["keep"] is True else given["keep"] or []
    for each in (fitted, type(fitted).load(str(tmp_path / "saved"))):
        scored = each.transform(frame)
        assert scored.columns == [*kept, given["prediction_col"]], about
        found = sorted(
            float(np.reshape(each[given["prediction_col"]], ())) for each in scored.collect()
        )
        assert found == pytest.approx(wanted, abs=1e-4), about


def test_feed_that_cannot_be_is_refused_and_the_nodes_wait_for_another(tmp_path: Path) -> None:
    pq.write_table(pa.table({"value": [1, 2]}), tmp_path / "a.parquet")
    refused: tuple[tuple[Any, Chosen, str], ...] = (
        (iter(range(2)), {"epochs": 2}, "can be read only once, but epochs=2"),
        (range(2), {"reader": "nodes"}, "nodes cannot read these data themselves"),
        (str(tmp_path), {"reader": "spark"}, "reader='spark' is for DataFrames"),
        (range(2), {"role": "chief"}, "no such node can be fed"),
    )
    with launch(wait_for_end) as cluster:
        for data, given, match in refused:
            with pytest.raises(ConfigError, match=match):
                cluster.feed(data, **given)
        assert cluster.feed(range(2)).rows_used == 2


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"roles": sparkdl.Roles(coordinator=True)}, "has no parameter servers"),
        ({"recovery": sparkdl.Recovery(min_nodes=3)}, "must be at most the 2 nodes"),
        ({"num_gpus": {"evaluator": 1}}, "must name roles of the cluster"),
    ],
)
def test_launch_that_cannot_be_is_refused(given: Chosen, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        launch(wait_for_end, **given)
