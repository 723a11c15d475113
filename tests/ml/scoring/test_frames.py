"""A model's folder gives back its columns, and scores DataFrames of pandas as before."""

from __future__ import annotations

from pathlib import Path

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.source import Tensor, source_of_content
from sparkdl.ml.scoring.columns import OutputColumn
from sparkdl.ml.scoring.frames import FrameScorer
from sparkdl.ml.scoring.inputs import InputColumn
from sparkdl.ml.scoring.task import Score
from sparkdl.ml.scoring.torch import module_content
from tests.ml import torch_models

pd = pytest.importorskip("pandas")
FLOATS = pa.list_(pa.field("element", pa.float32()))


@pytest.mark.torch
def test_saved_model_has_its_columns_again_and_scores_numbers_and_arrays(tmp_path: Path) -> None:
    left, right = Tensor("left", "float32", (None, 3)), Tensor("right", "int64", (None,))
    score = Score(
        source_of_content(module_content(torch_models.two_in_two_out()), "module"),
        "the model",
        (InputColumn("x", left), InputColumn("n", right)),
        (OutputColumn("y", "output_0", FLOATS),),
        8,
        "error",
    )
    rows = pd.DataFrame({"x": list(np.arange(6, dtype=np.float32).reshape(2, 3)), "n": [1, 2]})
    FrameScorer(score).save(tmp_path)
    loaded = FrameScorer.load(tmp_path)
    assert (loaded.score.inputs, loaded.score.outputs) == (score.inputs, score.outputs)
    expected, found = FrameScorer(score).predict(rows), loaded.predict(rows)
    assert len(expected) == 2
    pd.testing.assert_frame_equal(found, expected)


@pytest.mark.parametrize("kind", ["", "AAAA", "/////w==", 7])
def test_folder_whose_types_are_broken_holds_no_model(kind: str | int, tmp_path: Path) -> None:
    score = Score(
        source_of_content(cloudpickle.dumps(None), "keras"),
        "the model",
        (),
        (OutputColumn("y", "y", pa.int64()),),
        8,
        "error",
    )
    FrameScorer(score).save(tmp_path)
    file = tmp_path / "score.json"
    head, _, tail = file.read_text().partition('"type":"')
    rest = tail.partition('"')[2]
    text = f'"{kind}"' if isinstance(kind, str) else str(kind)
    file.write_text(f'{head}"type":{text}{rest}')
    with pytest.raises(ConfigError, match="holds no model that was saved whole"):
        FrameScorer.load(tmp_path)
