"""One process without Spark: it reads the files, trains with batches as large as two nodes'."""

from __future__ import annotations

import argparse

import numpy as np
from harness import NODES
from jobs import (
    Phases,
    Told,
    arrays,
    compete,
    first_batch,
    keras_model,
    options,
    shuffled,
    torch_loop,
    torch_model,
)


def by_keras(parsed: argparse.Namespace, phases: Phases, told: Told) -> float:
    """Train, save, load and score with Keras."""
    import keras

    told.mark("entered")
    x, y = arrays(parsed.train)
    model = keras_model(keras)
    ticks = [first_batch(keras, told)]
    model.fit(x, y, parsed.batch * NODES, parsed.epochs, verbose=0, callbacks=ticks)
    told.mark("trained")
    model.save(f"{parsed.model}.keras")
    told.end(phases, parsed.deadline_s, nodes=1)
    phases.end("save")
    x, y = arrays(parsed.test)
    scores = keras.saving.load_model(f"{parsed.model}.keras").predict(x, 1024, verbose=0)
    return float(np.mean(scores.argmax(1) == y))


def by_torch(parsed: argparse.Namespace, phases: Phases, told: Told) -> float:
    """Train, save, load and score with PyTorch."""
    import torch

    told.mark("entered")
    x, y = arrays(parsed.train)
    torch.manual_seed(0)
    model = torch_model()
    batch = parsed.batch * NODES
    torch_loop(model, parsed.epochs, lambda: shuffled(x, y, batch), told)
    told.mark("trained")
    torch.save(model, f"{parsed.model}.pt")
    told.end(phases, parsed.deadline_s, nodes=1)
    phases.end("save")
    x, y = arrays(parsed.test)
    model = torch.load(f"{parsed.model}.pt", weights_only=False)
    with torch.no_grad():
        scores = torch.cat([model(part) for part in torch.from_numpy(x).split(1024)])
    return float(np.mean(scores.argmax(1).numpy() == y))


def job(parsed: argparse.Namespace, phases: Phases, told: Told) -> float:
    """Be the user's program."""
    share = (by_keras if parsed.framework == "keras" else by_torch)(parsed, phases, told)
    phases.end("score")
    return share


if __name__ == "__main__":
    compete(options(__doc__).parse_args(), job)
