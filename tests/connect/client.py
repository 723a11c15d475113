"""What a client of a Spark Connect server does with sparkdl, one topic a run.

Runs in: a process of a Python that has `pyspark-client` alone: `client.py URL TOPIC FOLDER`. It
prints JSON, a line for each thing that was tried.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import sparkdl
from sparkdl.core.errors import ConfigError

SOON_S = 90.0


def said(what: str, found: Any) -> None:
    print(json.dumps({"what": what, "found": found}), flush=True)


def refusal(call: Any, *given: Any, **options: Any) -> str:
    try:
        return f"no error: {call(*given, **options)}"
    except ConfigError as error:
        return str(error)


def total(_args: Any, ctx: Any) -> int:
    return sum(int(sum(batch["id"])) for batch in ctx.batches(5))


def answer(_args: Any, ctx: Any) -> None:
    feed = ctx.get_data_feed(train_mode=False)
    while not feed.should_stop():
        if batch := feed.next_batch(5):
            feed.batch_results([2 * row[0] for row in batch])


def square(params: Any, _ctx: Any) -> Any:
    return -((params["x"] - 3) ** 2)


def rank(_args: Any, ctx: Any) -> Any:
    return [ctx.executor_id, ctx.num_workers]


def tenfold(number: int) -> int:
    return 10 * number


PLAIN: dict[str, Any] = {"framework": "plain"}


def feeds(spark: Any, _folder: Path) -> None:
    with sparkdl.launch(spark, total, nodes=2, **PLAIN) as cluster:
        cluster.feed(spark.range(40))
        said("feed", sum(cluster.results()))
    with sparkdl.launch(spark, answer, nodes=2, **PLAIN) as cluster:
        rows = cluster.infer(spark.range(20), schema="twice long").collect()
        said("infer", sorted(row.twice for row in rows) == list(range(0, 40, 2)))
    found = []
    other = threading.Thread(
        target=lambda: found.extend(sparkdl.run(None, rank_of, nodes=2, **PLAIN))
    )
    other.start()
    other.join(SOON_S)
    said("the program's session in another thread", found)


def rank_of(_args: Any, ctx: Any) -> int:
    return int(ctx.rank)


def search(spark: Any, _folder: Path) -> None:
    from sparkdl.ml import tuning

    found = tuning.search(
        *(spark, square, lambda trial: {"x": trial.suggest_int("x", 1, 3)}), trials=3, parallelism=2
    )
    ends = [trial.user_attrs.get("error") or trial.state.name.lower() for trial in found.trials]
    said("search", ends)


def stages(_spark: Any, folder: Path) -> None:
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import VectorAssembler

    path = str(folder / "estimator")
    estimator = sparkdl.TFEstimator(total, {"rate": 0.5}).setClusterSize(3)
    estimator.save(path)
    estimator.setClusterSize(4).write().overwrite().save(path)
    loaded = sparkdl.TFEstimator.load(path)
    said("estimator", [loaded.getClusterSize(), loaded.uid == estimator.uid])
    both = Pipeline(stages=[VectorAssembler(inputCols=["a"], outputCol="b"), estimator])
    both.write().overwrite().save(str(folder / "pipeline"))
    kinds = [type(stage).__name__ for stage in Pipeline.load(str(folder / "pipeline")).getStages()]
    said("pipeline", kinds)


def heavy() -> Any:
    """Make a module of 16 MB."""
    import torch

    module = torch.nn.Linear(1, 1)
    module.register_parameter("ballast", torch.nn.Parameter(torch.ones(4_000_000)))
    return module


def models(spark: Any, folder: Path) -> None:
    from sparkdl.ml import model_file

    model_file._PLAN_NBYTES = 1 << 20
    rows = spark.range(40).selectExpr("array(float(id / 40)) x", "float(id / 20) y")
    estimator = sparkdl.TorchEstimator(heavy, loss="MSELoss", features_col="x", label_col="y")
    made = estimator.setEpochs(2).fit(rows)
    made.save(str(folder / "model"))
    loaded = sparkdl.TorchModel.load(str(folder / "model"))
    said("files", [made._file.nbytes > 16e6, made._file.digest == loaded._file.digest])
    scores = [[r.prediction for r in m.transform(rows).sort("x").collect()] for m in (made, loaded)]
    said("scores", [len(set(scores[0])), scores[0] == scores[1]])


def stream(spark: Any, folder: Path) -> None:
    (folder / "in").mkdir()
    reader = spark.readStream.schema("x long").parquet(str(folder / "in"))
    with sparkdl.launch(spark, rank_of, nodes=1, **PLAIN) as cluster:
        said("stream", refusal(cluster.train_stream, reader))


def faces(spark: Any, folder: Path) -> None:
    from sparkdl.horovod.spark import run
    from sparkdl.tfos import TFCluster, TFParallel, dfutil

    mode = TFCluster.InputMode.SPARK
    cluster = TFCluster.run(spark, total, None, 2, input_mode=mode, **PLAIN)
    cluster.train(spark.range(40), 1)
    cluster.shutdown()
    said("TFCluster", sum(cluster.cluster.results()))
    said("TFParallel", TFParallel.run(spark, rank, None, 2))
    said("TFParallel, no barrier", TFParallel.run(spark, rank, None, 3, use_barrier=False))
    said("Horovod", run(tenfold, (4,), num_proc=2, verbose=0, spark=spark))
    said("Horovod, active session", run(tenfold, (4,), num_proc=1, verbose=0))
    said("Horovod, num_proc", refusal(run, tenfold, (4,)))
    rows = spark.range(5).selectExpr("id", "cast(id as string) name")
    dfutil.saveAsTFRecords(rows, str(folder / "records"))
    loaded = dfutil.loadTFRecords(spark, str(folder / "records"))
    said("dfutil", sorted([row.id, row.name] for row in loaded.collect()))
    said("dfutil again", refusal(dfutil.saveAsTFRecords, rows, str(folder / "records")))


def jobs(spark: Any, _folder: Path) -> None:
    from sparkdl.ml.jobs.fit import Jobs
    from sparkdl.ml.jobs.work import Plan

    said("mode='jobs'", refusal(Jobs, spark, Plan(1, 1, 1, False, 0)))


def sessions(_spark: Any, folder: Path) -> None:
    """A session that is nobody's default, as a notebook's server may make it."""
    from pyspark.sql.connect.session import SparkSession

    spark: Any = SparkSession(sys.argv[1])
    said("no session", refusal(sparkdl.launch, None, total, **PLAIN))
    with sparkdl.launch(spark, total, nodes=2, **PLAIN) as cluster:
        cluster.feed(spark.range(40))
        said("feed", sum(cluster.results()))
    estimator = sparkdl.TFEstimator(total)
    estimator.write().session(spark).overwrite().save(str(folder / "stage"))
    loaded = sparkdl.TFEstimator.read().session(spark).load(str(folder / "stage"))
    said("stage", loaded.uid == estimator.uid)
    spark.stop()


def main(url: str, topic: str, folder: str) -> None:
    spark = None
    if topic != "sessions":
        from pyspark.sql import SparkSession

        builder: Any = SparkSession.builder
        spark = builder.remote(url).getOrCreate()
    Path(folder).mkdir(exist_ok=True)
    globals()[topic](spark, Path(folder))
    said("py4j", "py4j" in sys.modules)


if __name__ == "__main__":
    main(*sys.argv[1:])
