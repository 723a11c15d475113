"""What nodes train in tests of PyTorch's estimators, and the same in one process.

Here, and not beside the tests, for whoever runs a function imports its module.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

SEED, ROWS = 5, 46
_RNG = np.random.default_rng(3)
X = _RNG.normal(size=(ROWS, 3)).astype(np.float32)
Y = (X @ [1.0, -2.0, 0.5]).astype(np.float32)
W = _RNG.uniform(0.0, 2.0, ROWS).astype(np.float32)
DATA = [{"x": x.tolist(), "y": float(y), "w": float(w)} for x, y, w in zip(X, Y, W, strict=True)]


class Alone:
    """The context of a node without others, whose feeds are these columns.

    Attributes:
        passes: how often each feed was begun.
    """

    num_workers, rank, is_chief, last_checkpoint = 1, 0, True, None
    _checkpoints = SimpleNamespace(await_in_flight=lambda: None)

    def __init__(self, **columns: Any) -> None:
        self.columns, self.passes = columns, dict.fromkeys(("input", "validation"), 0)

    def torch_dataset(self, batch_size: int, *_: Any, feed: str = "input", **options: Any) -> Any:
        import torch

        ctx, is_padded = self, options.get("tail") == "pad"

        class Feed(torch.utils.data.IterableDataset):  # type: ignore[misc]
            def __iter__(self) -> Any:
                ctx.passes[feed] += 1
                rows = len(next(iter(ctx.columns.values())))
                for start in range(0, rows, batch_size):
                    batch = {n: v[start : start + batch_size] for n, v in ctx.columns.items()}
                    count = len(next(iter(batch.values())))
                    weight = {"sample_weight": torch.ones(count)} if is_padded else {}
                    yield {
                        name: values if isinstance(values[0], str) else torch.tensor(values)
                        for name, values in batch.items()
                    } | weight

        return Feed()

    def absolute_path(self, path: str) -> str:
        return path

    def all_gather(self, value: Any) -> list[Any]:
        return [value]


def adam(parameters: Any, rate: float = 0.05) -> Any:
    """Make the optimizer that the net is trained with."""
    import torch

    return torch.optim.Adam(parameters, rate)


def still(parameters: Any) -> Any:
    """Make an optimizer that changes nothing."""
    return adam(parameters, 0.0)


def distance(output: Any, label: Any) -> Any:
    """Return how far each output is from its label."""
    return (output - label).abs()


def net() -> Any:
    """Make a regression of three features; its loss falls."""
    import torch

    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def normed() -> Any:
    """Make a classifier that normalises over the batch."""
    import torch

    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )


def partly_used() -> Any:
    """Make a model of which a part is in no step."""
    import torch

    class Partly(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.unused = net(), torch.nn.Linear(3, 1)

        def forward(self, x: Any) -> Any:
            return self.net(x)

    return Partly()


def alone(
    epochs: int, weighted: bool = False, rows: Any = slice(None)
) -> tuple[list[float], list[Any]]:
    """Train `net` on these rows in each step, in this process; return losses and weights."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    x, y = torch.tensor(X[rows]), torch.tensor(Y[rows])
    weight = torch.tensor(W[rows]) if weighted else torch.ones(len(y))
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        squares = (model(x)[:, 0] - y) ** 2
        loss = (squares * weight).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weights_of(model)


def weights_of(module: Any) -> list[Any]:
    """Return the parameters as arrays."""
    return [each.detach().numpy() for each in module.parameters()]


def at_epochs(call: Any) -> list[Any]:
    """Return a callback that calls `call(epoch, trainer)` as each epoch ends."""
    from lightning.pytorch.callbacks import LambdaCallback

    return [LambdaCallback(on_train_epoch_end=lambda tr, _: call(tr.current_epoch, tr))]


def die_once(marker: Path, at: int) -> list[Any]:
    """Return a callback that kills the first process that ends epoch `at`, before it is saved."""

    def die(epoch: int, trainer: Any) -> None:
        if epoch == at:
            with suppress(FileExistsError):
                marker.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)

    return [*at_epochs(die), *worsen(2, marker.parent)]


def worsen(after: int, folder: Path | None = None) -> list[Any]:
    """Return callbacks with which the loss grows after an epoch, which then end the training."""
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    def set_rate(epoch: int, trainer: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.05 if epoch < after else 3.0

    best = ModelCheckpoint(folder, monitor="val_loss")
    return [*at_epochs(set_rate), EarlyStopping("val_loss", patience=2), best]


def stop_on_one(at: int) -> list[Any]:
    """Return a callback that stops the training on one node."""

    def stop(epoch: int, trainer: Any) -> None:
        trainer.should_stop = epoch == at and trainer.global_rank == 1

    return at_epochs(stop)


def line() -> Any:
    """Make a LightningModule around `net`."""
    from lightning.pytorch import LightningModule

    class Line(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Any) -> Any:
            return self.net(x)

        def _loss(self, batch: Any) -> Any:
            x, y, *weight = batch
            squares = (self(x)[:, 0] - y) ** 2
            return (squares * weight[0] if weight else squares).mean()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self._loss(batch)
            how = {"on_step": False, "on_epoch": True, "sync_dist": True}
            self.log("loss", loss, batch_size=len(batch[1]), **how)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self._loss(batch), batch_size=len(batch[1]))

        def configure_optimizers(self) -> Any:
            return adam(self.parameters())

        def on_train_epoch_end(self) -> None:
            self.log("epoch", float(self.current_epoch))

    return Line()
