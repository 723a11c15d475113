"""Hyper-parameter search with Optuna: trials in parallel, the hopeless ones ended early.

    spark-submit examples/tuning/optuna_digits.py

Each trial is a sub-cluster of its own on Spark's executors, here of one node. Its accuracy after
each epoch goes to the driver, where Optuna's pruner decides whether the trial goes on. Needs
`pip install optuna`.

Data: the 1,797 images of scikit-learn's `load_digits`. Prints the best parameters and `tuning: best
accuracy`, above 0.7. Takes about 40 seconds on two cores.
"""

from __future__ import annotations

import argparse

from sparkdl import search


def train(params, ctx):
    """Train on scikit-learn's digits with these parameters; return the accuracy. Runs in a node."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = map(
        torch.tensor, train_test_split(images / 16, labels, test_size=0.25, random_state=0)
    )
    model = torch.nn.Sequential(
        torch.nn.Linear(64, params["units"]),
        torch.nn.ReLU(),
        torch.nn.Linear(params["units"], 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=params["learning_rate"])
    accuracy = 0.0
    for epoch in range(params["epochs"]):
        for rows in torch.randperm(len(x)).split(64):
            loss = torch.nn.functional.cross_entropy(model(x[rows].float()), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = (model(x_test.float()).argmax(1) == y_test).float().mean().item()
        ctx.report(epoch, accuracy=accuracy)
    return {"accuracy": accuracy}


def space(trial):
    """Return the parameters of a trial."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-1, log=True),
        "units": trial.suggest_categorical("units", [16, 64]),
        "epochs": trial.suggest_int("epochs", 5, 10),
    }


def main() -> None:
    """Search on the session that spark-submit set up."""
    import optuna
    from pyspark.sql import SparkSession

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--parallelism", type=int, default=2)
    args = parser.parse_args()

    spark = SparkSession.builder.appName("sparkdl tuning").getOrCreate()
    try:
        found = search(
            spark,
            train,
            space,
            trials=args.trials,
            parallelism=args.parallelism,
            metric="accuracy",
            study=optuna.create_study(
                direction="maximize",
                sampler=optuna.samplers.TPESampler(seed=0),
                pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=2),
            ),
        )
        print(found.trials_dataframe().sort_values("value").to_string())
        print(f"tuning: best {found.best_params}")
        print(f"tuning: best accuracy {found.best_value:.3f}")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
