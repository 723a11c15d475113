"""`DeepspeedTorchDistributor`: pyspark's arguments, and those of DeepSpeed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sparkdl
from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.torch_program import Program

pytestmark = pytest.mark.torch


def train() -> None:
    raise AssertionError("it runs without DeepSpeed")


def test_own_arguments_precede_deepspeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is imported in place of DeepSpeed is empty: its arguments are ours to give."""
    (tmp_path / "deepspeed.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    program, said = tmp_path / "program.py", tmp_path / "said.json"
    program.write_text(
        "import json, pathlib, sys\n"
        "found = [*sys.argv[1:-1], json.loads(pathlib.Path(sys.argv[-1]).read_text())]\n"
        f"pathlib.Path({str(said)!r}).write_text(json.dumps(found))\n"
    )
    config = tmp_path / "config.json"
    config.write_text('{"a": 1}')
    alone = sparkdl.DeepspeedTorchDistributor(useGpu=False, deepspeedConfig=str(config))
    alone.run(str(program), "--lr=0.1")
    found = json.loads(said.read_text())
    assert found == ["--lr=0.1", "--deepspeed", "--deepspeed_config", {"a": 1}]


def test_missing_deepspeed_says_where_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    program, ctx = Program(train, (), {}, deepspeed=""), SimpleNamespace(is_chief=True)
    with pytest.raises(FrameworkMissingError, match=r"DeepSpeed cannot be im.*pip install deeps"):
        program(None, ctx)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"numGpus": 0}, "numGpus=0: must be at least 1"),
        ({"nnodes": 0}, "nnodes=0: must be at least 1"),
        ({"deepspeedConfig": "/none.json"}, "'/none.json' cannot be used: .*No such file"),
        ({"deepspeedConfig": {"a": {1, 2}}}, "cannot be used: .*not JSON serializable"),
        ({"deepspeedConfig": __file__}, "cannot be used: "),
    ],
)
def test_bad_arguments_are_refused_before_any_start(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sparkdl.DeepspeedTorchDistributor(useGpu=False, **options)
