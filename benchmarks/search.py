"""How long does a search of Spark ML's take, and what do zygotes save that stay?

Runs `CrossValidator` over a small Keras model on two nodes, once without and once with agents that
stay for the next fit, each in a program of its own, and prints the seconds of each `fit`.
`README.md` says how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

KEEP_WARM_S = "60"
FEATURES = 8


def search(folds: int, choices: int, rows: int) -> float:
    """Fit; return the seconds."""
    import keras
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
    from pyspark.sql import SparkSession

    from sparkdl import KerasEstimator

    spark = (
        SparkSession.builder.master("local-cluster[2,2,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    data = spark.range(rows, numPartitions=4).selectExpr(
        f"array_repeat(id / {rows}, {FEATURES}) as features", f"id / {rows} as label"
    )
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    estimator = KerasEstimator(model, num_workers=2, epochs=2, batch_size=32)
    rates = [10.0**-n for n in range(1, choices + 1)]
    validator = CrossValidator(
        estimator=estimator,
        estimatorParamMaps=ParamGridBuilder().addGrid(estimator.learning_rate, rates).build(),
        evaluator=RegressionEvaluator(metricName="rmse"),
        numFolds=folds,
    )
    start_s = time.monotonic()
    validator.fit(data)
    seconds = time.monotonic() - start_s
    spark.stop()
    return seconds


def main() -> None:
    """Run both ways in turn, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--choices", type=int, default=4, help="of the learning rate")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--way", choices=["0", KEEP_WARM_S], help="run one way in this program")
    parsed = parser.parse_args()
    if parsed.way is not None:
        os.environ["SPARKDL_KEEP_WARM_S"] = parsed.way
        seconds = search(parsed.folds, parsed.choices, parsed.rows)
        fits = parsed.folds * parsed.choices + 1
        print(json.dumps({"keep_warm_s": parsed.way, "s": round(seconds, 1), "fits": fits}))
        return
    for _ in range(parsed.repeats):
        for way in ("0", KEEP_WARM_S):
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
