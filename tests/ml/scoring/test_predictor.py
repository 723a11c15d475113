"""Saved models of each format are described, loaded once, and run."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from sparkdl.core.errors import ConfigError, InferenceError
from sparkdl.ml.scoring.describe import signature_of
from sparkdl.ml.scoring.loaded import load, predictor
from sparkdl.ml.scoring.predictor import load_function
from sparkdl.ml.scoring.source import ModelSource, source_of, source_of_content
from sparkdl.ml.scoring.tensorflow import keras_predictor
from tests.ml.conftest import Saved
from tests.ml.models import linear

pytestmark = pytest.mark.tensorflow

X = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.mark.parametrize("kind", ["exported", "keras", "content"])
def test_every_format_gives_what_the_model_gives(saved: Saved, kind: str) -> None:
    if kind == "content":
        source = source_of_content(Path(saved.keras).read_bytes())
    else:
        source = source_of(getattr(saved, kind))
    found = load(source)
    (given,), (result,) = found.signature.inputs, found.signature.outputs
    assert (given.name, given.dtype, given.shape) == ("x", "float32", (None, 3))
    assert (result.dtype, result.shape) == ("float32", (None, 2))
    assert np.allclose(found({"x": X})[result.name], linear(X))


def test_saved_model_has_signatures_of_text_and_of_any_shape(saved: Saved) -> None:
    upper = load(source_of(saved.functions, "upper"))
    outputs = upper({"text": np.array(["a", "é"], object)})
    assert outputs["upper"].tolist() == [b"A", "é".encode()]
    assert outputs["length"].tolist() == [1, 2]
    assert [str(t) for t in upper.signature.outputs] == ["length (int32 [?])", "upper (string [?])"]
    vary = load(source_of(saved.functions, "vary", "serve")).signature
    assert [str(t) for t in vary.outputs] == ["count (int32 [?])", "same (int32 [?, ?])"]
    turned = load(source_of(saved.functions, "transpose")).signature
    assert [str(t) for t in turned.outputs] == ["all (float32 [])", "turned (float32 [?, 2, 2])"]


def test_process_holds_one_model_by_its_content(saved: Saved, tmp_path: Path) -> None:
    first = source_of(saved.keras)
    held = predictor(first)
    assert predictor(source_of(saved.keras)) is held
    other = predictor(source_of(saved.two))
    assert other is not held
    assert predictor(first) is not held
    copy = tmp_path / "model.keras"
    copy.write_bytes(Path(saved.keras).read_bytes())
    before = source_of(str(copy))
    os.utime(copy, ns=(0, 0))
    assert source_of(str(copy)) != before


@pytest.mark.smoke
def test_models_are_described_without_tensorflow_in_the_driver(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise OSError("no such weights")

    monkeypatch.delitem(sys.modules, "tensorflow")
    unknown = replace(source_of(saved.exported), fingerprint="")  # it is asked each time
    assert str(signature_of(unknown).inputs[0]) == "x (float32 [?, 3])"
    unloadable = source_of_content(cloudpickle.dumps((fails, ())), "function")
    with pytest.raises(ConfigError, match="cannot be loaded: OSError: no such weights"):
        signature_of(unloadable)
    assert "tensorflow" not in sys.modules


def test_what_cannot_be_loaded_is_a_typed_error(saved: Saved, tmp_path: Path) -> None:
    broken = tmp_path / "broken.keras"
    broken.write_bytes(b"no zip")
    with pytest.raises(ConfigError, match=r"the model .*broken\.keras cannot be loaded"):
        signature_of(source_of(str(broken)))
    with pytest.raises(ConfigError, match=r"no signature 'gone'; it has .*'upper'"):
        signature_of(source_of(saved.functions, "gone"))
    with pytest.raises(ConfigError, match="no saved model at"):
        source_of(str(tmp_path / "gone"))
    far = source_of("s3://bucket/model.keras")  # asked each time
    assert (far.path, far.fingerprint) == ("s3://bucket/model.keras", "")


def test_function_of_a_module_that_was_not_shipped_names_how_to_ship_it() -> None:
    source = ModelSource("", "function", "", content=b"chelpers_of_the_driver\nmake\n.")
    with pytest.raises(InferenceError, match=r"no module 'helpers_of_the_driver'. Install it on"):
        load_function(source, None)


def test_model_that_does_not_tell_its_inputs_says_what_to_do(tmp_path: Path) -> None:
    import keras

    class Own(keras.Model):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x

    with pytest.raises(ConfigError, match=r"without known inputs. .*model\.export"):
        keras_predictor(Own())
