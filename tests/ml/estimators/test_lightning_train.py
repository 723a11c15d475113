"""What `LightningEstimator` checks and hands to Lightning, without nodes."""

from __future__ import annotations

from typing import Any

import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.lightning_train import _watch_first
from tests.doubles.lazy import Lazy

torch: Any = Lazy("torch")
pytestmark = [pytest.mark.torch]


def test_first_call_of_a_step_may_not_mix_rows() -> None:
    class Steps:
        net = torch.nn.Linear(3, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return (self.net(x) - y).abs().mean()

    module, batch = Steps(), (torch.ones(4, 3), torch.ones(4))
    _watch_first(module, "training_step")
    error = r"Steps.training_step puts features \[4, 1\] beside label \[4\]: PyTorch"
    with pytest.raises(ConfigError, match=error):
        module.training_step(batch, 0)
    assert module.training_step(batch, 0).ndim == 0, "later calls are the module's own"
