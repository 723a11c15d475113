"""Horovod's face for PyTorch in this process, which no node is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from sparkdl.core.errors import ConfigError

pytestmark = pytest.mark.torch


def test_process_that_sparkdl_has_not_started_is_alone() -> None:
    import torch

    import sparkdl.horovod.torch as hvd

    hvd.init(process_sets="dynamic")
    try:
        place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size(), hvd.join())
        assert place == (0, 1, 0, 1, 0)
        x = torch.arange(3.0, requires_grad=True)
        assert hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0).tolist() == [0, 2, 4]
        assert hvd.allgather(x).tolist() == hvd.broadcast(x, 0).tolist() == [0, 1, 2]
        moved: Any = hvd.alltoall(x)
        assert moved.tolist() == hvd.reducescatter(x).tolist() == [0, 1, 2]
        assert hvd.synchronize(hvd.allreduce_async_(x.detach())).tolist() == [0, 1, 2]
        assert hvd.allgather_object("it") == ["it"]
        hvd.barrier()
        hvd.shutdown()
        with pytest.raises(ConfigError, match="uses no MPI"):
            hvd.init(comm=object())
        with pytest.raises(ConfigError, match="use process_sets"):
            hvd.init(comm=[0, 1])
    finally:
        hvd.shutdown()


def test_commit_of_other_attributes_is_refused(tmp_path: Path) -> None:
    from sparkdl.horovod.common.elastic import ObjectState

    last = SimpleNamespace(folder=tmp_path, url=str(tmp_path), step=5)
    ctx: Any = SimpleNamespace(last_checkpoint=last)
    state = ObjectState(epoch=0)
    (tmp_path / "horovod-state.pkl").write_bytes(cloudpickle.dumps({"step": 1}))
    with pytest.raises(ConfigError, match="'step', but this ObjectState keeps"):
        state._resume(ctx)
    (tmp_path / "horovod-state.pkl").write_bytes(cloudpickle.dumps({"epoch": 3}))
    state._resume(ctx)
    assert state.epoch == 3


def test_last_gradients_come_first_and_the_first_bucket_is_small() -> None:
    from sparkdl.horovod.common.operations import Slot, plan

    mb = 1 << 20
    slots = [Slot(30 * mb, "float32")] + [Slot(mb // 2, "float32")] * 6
    assert plan(slots) == ((6, 5), (4, 3, 2, 1), (0,))
