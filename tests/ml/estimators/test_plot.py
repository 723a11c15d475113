"""What came of the epochs is drawn."""

from __future__ import annotations

import numpy as np
import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.plot import plotted


def test_metric_is_drawn_with_that_of_the_validation_rows() -> None:
    pytest.importorskip("matplotlib")
    figure = plotted({"loss": [0.5, 0.25], "accuracy": [0.5, 1.0], "val_loss": [0.6, 0.7]})
    assert [part.get_title() for part in figure.axes] == ["loss", "accuracy"]
    loss, accuracy = figure.axes
    drawn = {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in loss.lines}
    assert drawn == {"training": [0.5, 0.25], "validation": [0.6, 0.7]}
    assert np.asarray(loss.lines[0].get_xdata()).tolist() == [1, 2]
    assert len(accuracy.lines) == 1


def test_history_without_epochs_is_not_drawn() -> None:
    with pytest.raises(ConfigError, match="no history"):
        plotted({})
