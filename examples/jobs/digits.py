"""Training as Spark jobs: no nodes, no ports; each iteration is a Spark job.

    spark-submit examples/jobs/digits.py

The 1797 digits of scikit-learn (https://archive.ics.uci.edu/dataset/80) train a network of PyTorch
on as many partitions as asked for. They need not fit into the task slots at once: `--master
local[1]` gives the same model.

Prints `jobs: test accuracy`, above 0.9. Takes about 50 seconds on two cores.
"""

from __future__ import annotations

import argparse

from sparkdl.ml.jobs import fit_in_jobs


def make_model():
    """Return a network from 64 pixels to the scores of ten digits. Runs in Spark's workers too."""
    import torch

    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def loss_of(model, batch):
    """Return the mean loss of a batch `{"image": float32 [rows, 64], "label": int64 [rows]}`."""
    import torch

    return torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])


def main() -> None:
    """Train and evaluate on the session that spark-submit set up."""
    import torch
    from pyspark.sql import SparkSession
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images / 16, labels, test_size=0.25, random_state=0)
    rows = [(pixels.tolist(), int(label)) for pixels, label in zip(x, y, strict=True)]

    spark = SparkSession.builder.appName("sparkdl jobs").getOrCreate()
    try:
        frame = spark.createDataFrame(rows, "image array<float>, label long")
        found = fit_in_jobs(
            frame,
            make_model,
            loss_of,
            lambda parameters: torch.optim.Adam(parameters, lr=0.01),
            num_partitions=args.partitions,
            batch_size=64,
            epochs=args.epochs,
        )
        print(
            f"jobs: {found.iterations} iterations, {found.iterations / found.seconds:.1f} a second"
        )
        with torch.no_grad():
            scores = found.model(torch.tensor(x_test, dtype=torch.float32))
        accuracy = (scores.argmax(1).numpy() == y_test).mean()
        print(f"jobs: test accuracy {accuracy:.3f}")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
