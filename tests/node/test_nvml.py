"""The GPUs of hosts of every kind, told by an NVML made of lists."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sparkdl.core.errors import FrameworkMissingError
from sparkdl.node import gpus
from sparkdl.node.gpus import Gpu, has_driver, list_gpus, open_nvml
from tests.doubles.nvml import Device, Nvml


def test_a_gpu_is_what_the_driver_says_of_it() -> None:
    devices = [
        Device("NVIDIA H100 80GB HBM3", (7, 8), uuid="GPU-a", used_nbytes=5),
        Device("Tesla", uuid="GPU-b"),
    ]
    assert list_gpus(Nvml(*devices)) == [
        Gpu("GPU-a", "NVIDIA H100 80GB HBM3", (7, 8), 0, 5),
        Gpu("GPU-b", "Tesla", (), 1, 0),
    ]


def test_instances_of_a_split_gpu_stand_for_it_and_have_its_number() -> None:
    parts = (Device("1g", (9,), uuid="MIG-a"), None, Device("1g", uuid="MIG-b"))
    found = list_gpus(Nvml(Device("T4"), Device("NVIDIA A100", instances=parts)))
    assert [(gpu.uuid, gpu.index, gpu.pids) for gpu in found[1:]] == [
        ("MIG-a", 1, (9,)),
        ("MIG-b", 1, ()),
    ]


def test_a_gpu_that_a_container_hides_is_left_out_and_the_others_keep_their_numbers() -> None:
    found = list_gpus(Nvml(Device("T4", is_ours=False), Device("T4", uuid="GPU-b")))
    assert [(gpu.uuid, gpu.index) for gpu in found] == [("GPU-b", 1)]


@pytest.mark.parametrize("name", ["GRID", "NVIDIA GB10", "NVIDIA GeForce RTX 3090"])
def test_a_gpu_that_does_not_tell_all_is_one_all_the_same(name: str) -> None:
    """No processes of a virtual one, no memory of one that shares the CPU's, no instances."""
    assert list_gpus(Nvml(Device(name, uuid="GPU-a"))) == [Gpu("GPU-a", name)]


def test_nvml_is_closed_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with pytest.raises(KeyError), open_nvml() as opened:
        assert (opened, module.opened) == (module, 1)
        raise KeyError
    assert module.opened == 0


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(starts=False))
    with pytest.raises(FrameworkMissingError, match="does not answer: Driver Not Loaded"):
        open_nvml().__enter__()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(FrameworkMissingError, match=r"pip install nvidia-ml-py .*\[gpu\]"):
        open_nvml().__enter__()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_driver_is_known_by_its_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_there: bool
) -> None:
    device = tmp_path / "nvidiactl"
    if is_there:
        device.touch()
    monkeypatch.setattr(gpus, "_DEVICES", (str(device),))
    assert has_driver() == is_there
