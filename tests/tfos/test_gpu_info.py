"""Free GPUs, told by an NVML made of lists; with a real one where there is a GPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.tfos import gpu_info
from tests.doubles.nvml import Device, Nvml


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(*devices: Device, **options: Any) -> Nvml:
        module = Nvml(*devices, **options)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return module

    return make


NAMES = ("Tesla", "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 3090")


def test_busy_gpus_are_busy_whatever_the_product_is_called(nvml: Any) -> None:
    devices = [*(Device(name, (7,)) for name in NAMES), Device("NVIDIA A100 80GB PCIe")]
    module = nvml(*devices)
    assert gpu_info.is_gpu_available()
    assert gpu_info.get_gpus(1) == devices[4].uuid
    assert gpu_info.get_gpus(1, format=gpu_info.AS_LIST) == [devices[4].uuid]
    assert module.opened == 0, "NVML is closed again"
    with pytest.raises(ConfigError, match=r"2 GPUs were asked for, .* has 5, of which 1 are free"):
        gpu_info.get_gpus(2)


def test_each_worker_gets_the_next_ones_and_never_fewer(nvml: Any) -> None:
    devices = [Device("T4") for _ in range(3)]
    nvml(*devices)
    a, b, c = (device.uuid for device in devices)
    chosen = [gpu_info.get_gpus(2, index, gpu_info.AS_LIST) for index in range(4)]
    assert chosen == [[a, b], [c, a], [b, c], [a, b]]
    assert gpu_info.get_gpus(0, 1) == ""


def test_host_without_a_driver_has_no_gpu(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(starts=False)
    assert not gpu_info.is_gpu_available()
    with pytest.raises(FrameworkMissingError, match="does not answer: Driver Not Loaded"):
        gpu_info.get_gpus(1)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert not gpu_info.is_gpu_available()
    with pytest.raises(FrameworkMissingError, match="pip install nvidia-ml-py"):
        gpu_info.get_gpus(1)
