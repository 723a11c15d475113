"""The types of `**options`: they are those of what takes them, and a type checker uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sparkdl
from scripts.generate import OPTIONS, with_fields
from sparkdl import search
from tests.doubles.map_funs import hang


def test_types_of_options_are_those_of_launch() -> None:
    text = OPTIONS.read_text(encoding="utf-8")
    assert text == with_fields(text), "write them: python -m scripts.generate"


if TYPE_CHECKING:  # mypy refuses what it ignores here, or says that there is nothing to ignore
    sparkdl.run(None, hang, None, 2, executor="local", max_restarts=1, timeout_s=9)
    sparkdl.run(None, hang, None, 2, max_restart=1)  # type: ignore[call-arg]
    sparkdl.run(None, hang, None, 2, feeding=3)  # type: ignore[arg-type]
    sparkdl.launch(None, hang, node=2)  # type: ignore[call-arg]
    search(None, hang, lambda trial: {}, trials=2, executor="local", num_gpus={"worker": 1})
    search(None, hang, lambda trial: {}, trials=2, executor="yarn")  # type: ignore[arg-type]
