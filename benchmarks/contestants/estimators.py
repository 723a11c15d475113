"""The same small training by one of six estimators, two nodes, scikit-learn's digits.

Each function is what a user writes. Rows, batches, epochs, widths and learning rate are the same;
Horovod's estimators multiply the rate by the number of processes, so it is given half of it.
"""

from __future__ import annotations

import argparse
import inspect
import tempfile
import time
from typing import Any

EPOCHS = 10
BATCH = 32
RATE = 0.002


def keras(train: Any, folder: str) -> tuple[Any, list[float]]:
    from sparkdl import KerasEstimator

    def make() -> Any:
        import keras

        layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")]
        return keras.Sequential([keras.Input((64,)), *layers])

    model = KerasEstimator(
        make,
        loss="sparse_categorical_crossentropy",
        learning_rate=RATE,
        num_workers=2,
        batch_size=BATCH,
        epochs=EPOCHS,
    ).fit(train)
    return model, model.history["loss"]


def torch(train: Any, folder: str) -> tuple[Any, list[float]]:
    from torch import nn

    from sparkdl import TorchEstimator

    model = TorchEstimator(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        loss="CrossEntropyLoss",
        learning_rate=RATE,
        num_workers=2,
        batch_size=BATCH,
        epochs=EPOCHS,
    ).fit(train)
    return model, model.history["loss"]


def lightning_module() -> Any:
    import lightning
    from torch import nn, optim

    class Digits(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

        def forward(self, features: Any) -> Any:
            return self.layers(features.float())

        def training_step(self, batch: Any, _: int) -> Any:
            features, label = batch.values() if isinstance(batch, dict) else batch
            loss = nn.functional.cross_entropy(self(features), label.long())
            self.log("loss", loss, on_step=False, on_epoch=True)  # Horovod's history has no other
            return loss

        def configure_optimizers(self) -> Any:
            return optim.Adam(self.parameters(), self.rate)

    return Digits()


def lightning(train: Any, folder: str) -> tuple[Any, list[float]]:
    from sparkdl import LightningEstimator

    module = lightning_module()
    module.rate = RATE
    model = LightningEstimator(module, num_workers=2, batch_size=BATCH, epochs=EPOCHS).fit(train)
    return model, model.history["loss"]


def horovod_keras(train: Any, folder: str) -> tuple[Any, list[float]]:
    import keras

    from sparkdl.horovod.spark.common.store import Store
    from sparkdl.horovod.spark.keras import KerasEstimator

    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")]
    model = KerasEstimator(
        num_proc=2,
        store=Store.create(folder),
        model=keras.Sequential([keras.Input((64,)), *layers]),
        optimizer=keras.optimizers.Adam(RATE / 2),
        loss="sparse_categorical_crossentropy",
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
    ).fit(train)
    return model, model.getHistory()["loss"]


def horovod_torch(train: Any, folder: str) -> tuple[Any, list[float]]:
    from torch import nn, optim

    from sparkdl.horovod.spark.common.store import Store
    from sparkdl.horovod.spark.torch import TorchEstimator

    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = TorchEstimator(
        num_proc=2,
        store=Store.create(folder),
        model=module,
        optimizer=optim.Adam(module.parameters(), RATE / 2),
        loss=lambda output, label: nn.functional.cross_entropy(output, label.long()),
        input_shapes=[[-1, 64]],
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
    ).fit(train)
    return model, [epoch["train"]["loss"] for epoch in model.getHistory()]


def horovod_lightning(train: Any, folder: str) -> tuple[Any, list[float]]:
    from sparkdl.horovod.spark.common.store import Store
    from sparkdl.horovod.spark.lightning import TorchEstimator

    module = lightning_module()
    module.rate = RATE / 2
    model = TorchEstimator(
        num_proc=2,
        store=Store.create(folder),
        model=module,
        input_shapes=[[-1, 64]],
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
    ).fit(train)
    return model, [model.getHistory()["loss"]]


WAYS = {
    "KerasEstimator": (keras,),
    "TorchEstimator": (torch,),
    "LightningEstimator": (lightning, lightning_module),
    "horovod.spark.keras": (horovod_keras,),
    "horovod.spark.torch": (horovod_torch,),
    "horovod.spark.lightning": (horovod_lightning, lightning_module),
}


def main() -> None:
    """Fit, score the test rows, and write a JSON line."""
    from harness import claim_stdout, session, write  # where this is run, not where it is read

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    way = parser.parse_args().way
    fit, *parts = WAYS[way]
    lines = claim_stdout()
    with (
        session("bench-estimators", 2) as spark,
        tempfile.TemporaryDirectory(prefix="bench-estimators-") as folder,
    ):
        train, test = digits(spark)
        start = time.monotonic()
        model, losses = fit(train, folder)
        fit_s = time.monotonic() - start
        share = accuracy(model.transform(test))
        score_s = time.monotonic() - start - fit_s
    write(
        lines,
        {
            "event": "fit",
            "fit_s": fit_s,
            "score_s": score_s,
            "accuracy": share,
            "loss": losses[-1] if losses else None,
            "lines": sum(map(num_lines, (fit, *parts))),
        },
    )


def digits(spark: Any) -> tuple[Any, Any]:
    """Return DataFrames of 1,500 rows to train on and 297 to test with, in four partitions."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    rows = [([float(p) / 16 for p in x], int(y)) for x, y in zip(pixels, labels, strict=True)]
    schema = "features array<float>, label long"
    return (
        spark.createDataFrame(rows[:1500], schema).repartition(4, "label").cache(),
        spark.createDataFrame(rows[1500:], schema).repartition(4).cache(),
    )


def accuracy(scored: Any) -> float:
    """Return the share of rows whose class has the highest score, or is the prediction."""
    column = "label__output" if "label__output" in scored.columns else "prediction"
    right = total = 0
    for row in scored.select("label", column).collect():
        value = row[column]
        if not isinstance(value, float):
            value = max(range(len(value)), key=lambda place: value[place])
        right, total = right + (int(value) == row.label), total + 1
    return right / total


def num_lines(function: Any) -> int:
    """Return how many lines of code a user writes for it."""
    return sum(bool(line.strip()) for line in inspect.getsource(function).splitlines()) - 2


if __name__ == "__main__":
    main()
