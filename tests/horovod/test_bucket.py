"""Gradients come out of a bucket as what their optimizer expects."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from sparkdl.horovod.torch.bucket import Bucket  # noqa: E402 (it needs PyTorch)

pytestmark = pytest.mark.torch


def test_sparse_gradients_come_back_sparse_to_who_has_none_as_well() -> None:
    has, lacks, dense = (torch.nn.Parameter(torch.zeros(4, 2)) for _ in range(3))
    has.grad = torch.tensor([[0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]).to_sparse(1)
    dense.grad = torch.ones(4, 2)
    bucket = Bucket([has, lacks, dense], [True, True, True])
    for place, param in enumerate((has, lacks, dense)):
        bucket.fill(place, param.grad)
    assert bucket.waits_for == 0
    reduced = bucket.flat.clone()
    reduced[8:16] = torch.arange(8.0)  # another process has the second one
    reduced[-2] = 1.0
    bucket.spread(reduced, can_be_absent=True)
    assert torch.equal(has.grad.to_dense(), torch.tensor([[0.0] * 2, [2.0] * 2, [0] * 2, [0] * 2]))
    assert torch.equal(lacks.grad.to_dense(), torch.arange(8.0).view(4, 2))
    assert has.grad.is_sparse
    assert lacks.grad.is_sparse
    assert not dense.grad.is_sparse
    bucket.flat.zero_()
    reduced.zero_()
    assert float(lacks.grad.to_dense().sum()) == 28.0, "it is no view of the bucket"
