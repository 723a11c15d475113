"""Models of PyTorch give what the plain module gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from sparkdl.core.errors import ConfigError, InferenceError
from sparkdl.ml.scoring.columns import OutputColumn
from sparkdl.ml.scoring.inputs import InputColumn
from sparkdl.ml.scoring.loaded import load
from sparkdl.ml.scoring.source import NUMBER, Tensor
from sparkdl.ml.scoring.task import Score
from tests.doubles.lazy import Lazy
from tests.ml.torch_models import named, source, two_in_two_out

torch: Any = Lazy("torch")
pytestmark = pytest.mark.torch


@settings(deadline=None)
@given(data=st.data())
def test_scores_are_those_of_the_plain_module(data: st.DataObject) -> None:
    """Whatever the batch size, Spark's batches, and rows with nulls."""
    module = source(two_in_two_out())
    floats = st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3)
    row = st.tuples(st.none() | floats, st.none() | st.integers(0, 9))
    rows = data.draw(st.lists(row, max_size=12))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    signature = load(module).signature
    inputs = {tensor.name: tensor for tensor in signature.inputs}
    columns = (InputColumn("l", inputs["left"]), InputColumn("r", inputs["right"]))
    s = OutputColumn("s", "output_0", pa.list_(pa.float32()))
    n = OutputColumn("n", "output_1", pa.int64())
    size = data.draw(st.integers(1, 13))
    score = Score(module, "the model", columns, (s, n), size, "keep")
    parts = [rows[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    batches = [
        (
            pa.array([left for left, _ in part], pa.list_(pa.float64())),
            pa.array([right for _, right in part], pa.int64()),
        )
        for part in parts
    ]
    found = [row for array in score.structs(iter(batches)) for row in array.to_pylist()]
    assert len(found) == len(rows)
    for (left, right), outputs in zip(rows, found, strict=True):
        if left is None or right is None:
            assert outputs is None
            continue
        scores, number = two_in_two_out()(torch.tensor([left]), torch.tensor([right]))
        assert np.allclose(outputs["s"], scores[0].detach().numpy(), rtol=1e-5, atol=1e-4)
        assert outputs["n"] == number.item()


def test_inputs_are_the_parameters_of_forward() -> None:
    signature = load(source(two_in_two_out())).signature
    assert signature.inputs == (Tensor("left", NUMBER, None), Tensor("right", NUMBER, None))
    assert (signature.outputs, signature.optional) == ((), (Tensor("scale", NUMBER, None),))


def test_outputs_of_a_dict_go_by_key_and_bfloat16_comes_as_float32() -> None:
    found = load(source(named().to(torch.bfloat16)))
    given = {"x": np.array([[1.0, 2.0, 3.0]])}
    outputs = found(given)
    assert outputs.keys() == {"twice", "sum"}
    assert outputs["twice"].dtype == np.float32
    assert outputs["twice"].tolist() == [[2.0, 4.0, 6.0]]
    (twice,) = found.columns(given, [OutputColumn("a", "twice", pa.list_(pa.float32()))])
    assert twice.to_pylist() == [[2.0, 4.0, 6.0]]
    with pytest.raises(InferenceError, match="no output 'thrice', but 'twice', 'sum'"):
        found.columns(given, [OutputColumn("a", "thrice", pa.float32())])


def test_a_model_that_changes_its_input_does_not_change_the_rows() -> None:
    module = torch.nn.Sequential(torch.nn.ReLU(inplace=True))
    x = np.array([[-1.0, 1.0]], np.float32)
    x.flags.writeable = False
    found = load(source(module))({"input": x})
    assert found["output_0"].tolist() == [[0.0, 1.0]]
    assert x.tolist() == [[-1.0, 1.0]]


def test_what_cannot_be_used_says_why() -> None:
    class Many(torch.nn.Module):  # type: ignore[misc]
        def forward(self, *tensors: Any) -> Any:
            return tensors

    with pytest.raises(ConfigError, match=r"a torch.nn.Module must be given, and not 3"):
        source(3)
    many = source(Many())
    with pytest.raises(ConfigError, match=r"Many.forward takes \*tensors"):
        load(many)
