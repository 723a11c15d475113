"""Names of other packages that are imported as sparkdl."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import sparkdl
from sparkdl.core.errors import RemovedModuleError
from sparkdl.diagnosis.doctor import _judge_package


def test_name_of_a_namesake_is_an_import_error_that_says_what_to_use() -> None:
    with pytest.raises(ImportError, match=r"sparkdl-cluster: call sparkdl\.horovod\.spark\.run"):
        from sparkdl import HorovodRunner  # noqa: F401


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("xgboost", r"use xgboost\.spark"),
        ("transformers.named_image", "KerasModel"),
        ("horovod.runner_base", r"sparkdl\.horovod\.spark\.run"),
    ],
)
def test_module_of_a_namesake_is_an_import_error_that_says_what_to_use(
    name: str, said: str
) -> None:
    with pytest.raises(RemovedModuleError, match=said):
        import_module(f"sparkdl.{name}")


def test_other_names_have_the_usual_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        sparkdl.lunch  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'sparkdl\.lunch'"):
        import_module("sparkdl.lunch")


def test_doctor_finds_files_of_a_namesake(tmp_path: Path) -> None:
    assert not list(_judge_package(str(tmp_path)))
    (tmp_path / "transformers").mkdir()
    (check,) = _judge_package(str(tmp_path))
    assert check.verdict == "warning"
    assert "another package that is imported as sparkdl: transformers" in check.finding
