"""What holds of a framework that says nothing else."""

from __future__ import annotations

import sys

import pytest

from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.frameworks.framework import Framework
from sparkdl.frameworks.jax import Jax
from sparkdl.frameworks.tensorflow import TensorFlow
from sparkdl.frameworks.torch import Torch


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] "
         "Connection closed by peer [127.0.0.1]:2997", True),
        ("UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:538] Read "
         "error [127.0.0.1]:24785: Connection reset by peer", True),
        ("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
         "[127.0.0.1]:30872", True),
        ("Connection reset by peer", False),
        ("[external/gloo/gloo/transport/tcp/pair.cc:1] op.preamble.length <= op.nbytes", False),
    ],
)  # fmt: skip
def test_broken_connection_in_a_collective_is_another_nodes_fault(text: str, is_lost: bool) -> None:
    assert Framework().is_peer_lost(ValueError(text)) is is_lost


def test_framework_without_meshes_says_which_have_them() -> None:
    with pytest.raises(ConfigError, match=r"framework='plain' has no mesh.*framework='torch'"):
        Framework().mesh({"data": 2}, world=None, member=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Torch, Jax, TensorFlow])
def test_missing_framework_says_what_to_install(
    kind: type[Framework], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = kind.__name__.lower()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(FrameworkMissingError, match=f"{name}.*pip install {name}"):
        kind().import_modules()
