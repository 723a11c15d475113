"""Settings refuse what cannot work; the environment is read under both projects' names."""

from __future__ import annotations

from typing import Any

import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.core.settings import Environment


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, {}),
        ({"SPARKDL_DRIVER_HOST": "d"}, {"driver_host": "d"}),
        ({"TFOS_SERVER_HOST": "t"}, {"driver_host": "t"}),
        ({"SPARKDL_DRIVER_HOST": "d", "TFOS_SERVER_HOST": "t"}, {"driver_host": "d"}),
        ({"SPARKDL_DRIVER_HOST": "", "TFOS_SERVER_HOST": "t"}, {"driver_host": "t"}),
        ({"SPARKDL_DRIVER_HOST": ""}, {}),
        ({"SPARKDL_DRIVER_PORT": "5000"}, {"driver_ports": (5000,)}),
        ({"TFOS_SERVER_PORT": "5000-5002"}, {"driver_ports": (5000, 5001, 5002)}),
        ({"SPARKDL_DRIVER_PORT": "1", "TFOS_SERVER_PORT": "2"}, {"driver_ports": (1,)}),
        ({"SPARKDL_DRIVER_PORT": "7-7"}, {"driver_ports": (7,)}),
        ({"SPARKDL_DRIVER_PORT": "65535"}, {"driver_ports": (65535,)}),
        ({"SPARKDL_DRIVER_PORT": ""}, {"driver_ports": (0,)}),
        ({"SPARKDL_NODE_HOST": "n"}, {"node_host": "n"}),
        ({"SPARKDL_NODE_HOST": ""}, {}),
        ({"TENSORFLOW_PORT": "2222"}, {"node_port": 2222}),
        ({"TENSORFLOW_PORT": "2222-2300"}, {"node_port": 2222}),
        ({"TENSORFLOW_PORT": ""}, {}),
        ({"TENSORBOARD_PORT": "6006"}, {"board_port": 6006}),
        ({"TENSORBOARD_PORT": ""}, {}),
        ({"HADOOP_PREFIX": "/p", "HADOOP_HOME": "/h"}, {"hadoop_home": "/p"}),
        ({"HADOOP_HOME": "/h"}, {"hadoop_home": "/h"}),
        ({"HADOOP_HOME": ""}, {}),
        ({"SPARK_EXECUTOR_POD_IP": "10.0.0.1"}, {"is_pod": True}),
        ({"CONTAINER_ID": "container_1_0001_01_000002"}, {"is_yarn": True}),
    ],
)
def test_environment_reads_both_projects_names_and_takes_empty_for_unset(
    environ: dict[str, str], wanted: dict[str, Any]
) -> None:
    assert Environment.read(environ) == Environment(**wanted)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SPARKDL_DRIVER_PORT", "SPARKDL_DRIVER_PORT / TFOS_SERVER_PORT"),
        ("TFOS_SERVER_PORT", "SPARKDL_DRIVER_PORT / TFOS_SERVER_PORT"),
        ("TENSORFLOW_PORT", "TENSORFLOW_PORT"),
    ],
)
@pytest.mark.parametrize("text", ["x", "1-x", "1-2-3", "-5", "1.5", "65536", "10-9", "1-65536"])
def test_ports_that_are_none_are_refused_by_name(name: str, words: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words}='{text}' is "):
        Environment.read({name: text})
