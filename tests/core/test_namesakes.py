"""Names of other packages that are imported as sparkdl."""

from __future__ import annotations

from importlib import import_module

import pytest

import sparkdl
from sparkdl.core.errors import RemovedModuleError


def test_name_of_a_namesake_is_an_import_error_that_says_what_to_use() -> None:
    with pytest.raises(ImportError, match=r"sparkdl-cluster: sparkdl\.KerasEstimator"):
        from sparkdl import DeepImageFeaturizer  # noqa: F401


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("xgboost", r"use xgboost\.spark"),
        ("transformers.named_image", "KerasModel"),
        ("udf.keras_image_model", "KerasModel"),
    ],
)
def test_module_of_a_namesake_is_an_import_error_with_what_to_use(name: str, said: str) -> None:
    with pytest.raises(RemovedModuleError, match=said):
        import_module(f"sparkdl.{name}")


def test_other_names_have_the_usual_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        sparkdl.lunch  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'sparkdl\.lunch'"):
        import_module("sparkdl.lunch")


def test_name_of_another_package_says_whose_it_is_and_what_to_use() -> None:
    with pytest.raises(RemovedModuleError, match=r"TensorFlowOnSpark's: .*sparkdl\.tfos"):
        sparkdl.TFCluster  # noqa: B018
