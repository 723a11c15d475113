"""A picture of what came of the epochs of a training.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sparkdl.core.errors import ConfigError, FrameworkMissingError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_VALIDATION = "val_"


def plotted(history: Mapping[str, Sequence[float]]) -> Figure:
    """Return a figure with a part for each metric, its values over the epochs.

    Args:
        history: metric to its values, one for each epoch; `val_loss` is drawn with `loss`.

    Raises:
        ConfigError: if there is none.
        FrameworkMissingError: if matplotlib is not installed.
    """
    if not history:
        raise ConfigError("the training has no history to draw: return it from train_fn")
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise FrameworkMissingError("a plot needs matplotlib: pip install matplotlib") from error
    metrics = list(dict.fromkeys(name.removeprefix(_VALIDATION) for name in history))
    figure, axes = pyplot.subplots(
        1, len(metrics), figsize=(5 * len(metrics), 3.5), squeeze=False, layout="constrained"
    )
    for name, part in zip(metrics, axes[0], strict=True):
        for line, label in ((name, "training"), (f"{_VALIDATION}{name}", "validation")):
            if line in history:
                epochs = range(1, len(history[line]) + 1)
                part.plot(epochs, history[line], marker=".", label=label)
        part.set_title(name)
        part.set_xlabel("epoch")
        part.xaxis.get_major_locator().set_params(integer=True)
        part.legend()
    pyplot.close(figure)  # a notebook would show it once more at the end of the cell
    return figure
