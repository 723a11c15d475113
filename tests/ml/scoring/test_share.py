"""Whose rows meet on which device, and what the driver knows of an executor."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from sparkdl.ml.scoring.share import Share, Sharing, sharing_of, take_share
from sparkdl.node.gpus import owned_gpus

TASK = Share(1, None, 5)
ASSIGNED = Share(1, ("1",), 5)


@pytest.mark.parametrize(
    ("sharing", "share", "seen", "device"),
    [
        (Sharing("slot"), ASSIGNED, ("0",), None),
        (Sharing("executor"), None, ("0",), None),  # no task: the driver's own process
        (Sharing("executor"), TASK, (), ""),
        (Sharing("executor"), TASK, ("0", "1", "7"), "7"),
        (Sharing("executor"), ASSIGNED, ("0", "1"), "1"),
        (Sharing("auto"), TASK, (), None),
        (Sharing("auto"), TASK, ("0", "1"), "1"),
        (Sharing("auto", gpus_per_task=0.25), ASSIGNED, (), "1"),
        (Sharing("auto", gpus_per_task=1.0), ASSIGNED, ("0", "1"), None),
    ],
)
def test_slots_share_a_model_where_they_are_to_or_have_no_whole_gpu(
    sharing: Sharing,
    share: Share | None,
    seen: tuple[str, ...],
    device: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert sharing.device(share, seen) == device


@pytest.mark.parametrize(("visible", "second"), [("GPU-a,GPU-b", "GPU-b"), (None, "1")])
def test_worker_that_is_used_again_counts_the_gpus_of_its_executor(
    visible: str | None, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with patch.dict(os.environ, environ, clear=True):
        assert Sharing("executor").device(ASSIGNED, ()) == second
        take_share(ASSIGNED)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == second
        assert owned_gpus(["1"]) == (second,)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"spark.master": "local[4,2]"}, 4),
        ({"spark.master": "local[*]"}, None),
        ({"spark.master": "yarn", "spark.executor.cores": "8"}, 8),
        ({}, None),
    ],
)
def test_driver_tells_an_executors_cores(settings: dict[str, str], expected: int | None) -> None:
    def get(name: str, default: str) -> Any:
        return {"spark.task.resource.gpu.amount": "0.5", **settings}.get(name, default)

    found = sharing_of(SimpleNamespace(conf=SimpleNamespace(get=get)), "auto")
    assert found.cores == expected
    assert found.gpus_per_task == 0.5
