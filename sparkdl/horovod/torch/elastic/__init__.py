"""`hvd.elastic`: trainings that go on after nodes were lost.

Runs in: child

https://horovod.readthedocs.io/en/v0.28.1/elastic_include.html
"""

from __future__ import annotations

from sparkdl.horovod.common.elastic import ObjectState, State, run, run_fn
from sparkdl.horovod.torch.elastic.sampler import ElasticSampler
from sparkdl.horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run", "run_fn"]
