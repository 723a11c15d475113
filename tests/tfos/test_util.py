"""A process's own address, class path and GPUs."""

from __future__ import annotations

import ipaddress
import os
import socket
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.tfos import gpu_info, util


def test_address_is_this_hosts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    address = util.get_ip_address()
    assert ipaddress.ip_address(address)
    with socket.create_server((address, 0)):
        pass
    monkeypatch.setenv("SPARKDL_NODE_HOST", "10.1.2.3")
    assert util.get_ip_address() == "10.1.2.3"


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["10.0.0.1:5", "10.0.0.12:5", "10.0.0.1:6", "10.0.0.12:6"], [0, 0, 1, 1]),
        (["a:1", "b:1", "a:1"], [0, 0, 1]),  # two runs behind one address
        (["[fe80::1]:5", "[fe80::12]:5", "[fe80::1]:6"], [0, 0, 1]),
    ],
)
def test_peers_are_those_of_the_same_host_and_not_of_a_host_with_the_same_beginning(
    nodes: list[str], expected: list[int]
) -> None:
    assert [util.index_on_host(nodes, i) for i in range(len(nodes))] == expected
    assert util.index_on_host(nodes, -1) == -1


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (Namespace(num_gpus="2"), 2),
        ({"num_gpus": 0}, 0),
        ({"num_gpus": {"worker": 1}}, {"worker": 1}),
        (SimpleNamespace(), None),
        (Namespace(num_gpus=None), None),
        ([], None),
    ],
)
def test_number_of_gpus_is_read_from_a_namespace_or_a_dict(args: Any, expected: Any) -> None:
    assert util.num_gpus(args) == expected


@pytest.mark.parametrize(("has_gpus", "expected"), [(True, "2 GPUs of worker 1"), (False, "")])
def test_single_node_sees_its_own_gpus_or_none(
    monkeypatch: pytest.MonkeyPatch, has_gpus: bool, expected: str
) -> None:
    def get_gpus(count: int, index: int) -> str:
        return f"{count} GPUs of worker {index}"

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "before")
    monkeypatch.delenv("HADOOP_PREFIX", raising=False)
    monkeypatch.setattr(gpu_info, "is_gpu_available", lambda: has_gpus)
    monkeypatch.setattr(gpu_info, "get_gpus", get_gpus)
    util.single_node_env(2, 3, ["a:1", "ab:1", "b:1", "a:2"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
    util.single_node_env(0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
