"""One node of PyTorch's training, in this process: what it refuses, finds out and returns."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.ml.estimators.columns import Columns
from sparkdl.ml.estimators.torch_batch import loss_of
from sparkdl.ml.estimators.torch_train import TorchTask, traced, train
from sparkdl.ml.scoring.source import Signature
from sparkdl.ml.scoring.torch import module_of, module_signature
from tests.doubles.lazy import Lazy
from tests.ml.torch_fits import SEED, Alone, X, Y, adam, alone, net, still, weights_of
from tests.ml.torch_models import named, source, two_in_two_out

torch: Any = Lazy("torch")
pytestmark = [
    *(pytest.mark.torch, pytest.mark.usefixtures("lone_node")),
    pytest.mark.skipif(not find_spec("lightning"), reason="Lightning is not installed"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),  # PyTorch's, of what Lightning asks it
]


def task(features: Any = "x", **fields: Any) -> TorchTask:
    features = {features: ""} if isinstance(features, str) else features
    given = {"made": net, "batch_size": 100, "epochs": 2, "loss": "MSELoss", **fields}
    given = {"optimizer": adam, "seed": SEED, **given}
    return TorchTask(columns=Columns(features, {"y": ""}), name="fit", **given)


def signature_of(result: dict[str, Any]) -> list[str]:
    found = msgspec.json.decode(result["signature"], type=Signature)
    return [str(tensor) for tensor in found.outputs]


def linear(*sizes: int) -> Any:
    return lambda: torch.nn.Linear(*sizes)


def test_module_and_function_train_alike() -> None:
    """Of a module the weights are those that it has."""
    ctx: Any = Alone(x=X.astype(np.float64), y=Y.astype(np.float64))
    torch.manual_seed(SEED)
    for made in (net, source(net())):
        result = train(task(made=made), ctx)
        losses, weights = alone(2)
        assert result["history"]["loss"] == pytest.approx(losses, rel=1e-5)
        found = weights_of(module_of(result["content"]))
        assert all(map(np.allclose, found, weights))
        assert signature_of(result) == ["output_0 (float32 [?, 1])"]


@pytest.mark.parametrize(
    ("columns", "fields", "match"),
    [
        ({"x": X[:, 0]}, {"made": linear(46, 1)}, r"float32 \[1\] of input float32 \[46\]: .*46"),
        ({"x": X}, {"made": linear(3, 2)}, r"MSELoss compares .*\[46, 2\] with .*'y', .*\[46\]"),
        ({"x": ["a"] * 46}, {}, "column 'x' holds text"),
        ({"x": X}, {"made": list}, "returned a list: must be a torch.nn.Module"),
        ({"x": X}, {"made": two_in_two_out}, "has the inputs left, right, and input_mapping="),
        ({"x": X}, {"shapes": {"x": [1, 2]}}, r"'x' holds 3 values in a row, and .*takes 2"),
    ],
)
def test_what_cannot_be_trained_says_so_with_shapes(columns: Any, fields: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        train(task(**fields), Alone(y=Y, **columns))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "loss", "kinds"),
    [
        (linear(3, 4), "CrossEntropyLoss", (False, True)),
        (linear(3, 1), "BCEWithLogitsLoss", (False, True)),
        (linear(3, 1), "MSELoss", (False, False)),
        (
            lambda: torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Sigmoid()),
            *("BCELoss", (True, False)),
        ),
        (
            lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Softmax(1)),
            *("CrossEntropyLoss", (True, False)),
        ),
        (linear(3, 4), lambda a, b: a.mean() - b.sum(), (False, False)),
    ],
)
def test_classifiers_are_known_by_loss_and_values(made: Any, loss: Any, kinds: Any) -> None:
    (output,) = traced(made(), {"input": torch.tensor(X[:2])}, loss_of(loss).scores).outputs
    assert (output.is_softmax, output.is_logits) == kinds


def test_several_inputs_and_outputs_and_shapes() -> None:
    def loss(output: Any, label: Any) -> Any:
        return (output[0].sum(1) - label) ** 2

    ctx: Any = Alone(a=X, b=np.arange(46), y=Y.astype(np.float64))
    asked = task({"a": "left", "b": "right"}, made=two_in_two_out, loss=loss)
    result = train(asked, ctx)
    assert signature_of(result) == ["output_0 (float32 [?, 2])", "output_1 (int64 [?])"]
    ctx = Alone(x=X[:, 0], y=Y)
    result = train(task(made=named, loss=lambda o, y: o["twice"].mean(), shapes={"x": [1]}), ctx)
    assert signature_of(result) == ["twice (float32 [?, 1])", "sum (float32 [?])"]


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of its compiler
def test_compiled_module_trains_compiled_and_is_returned_plain() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    ctx: Any = Alone(x=X.astype(np.float64), y=Y.astype(np.float64))
    compiled = torch.compile(net(), backend="eager")
    assert [t.name for t in module_signature(compiled).inputs] == ["input"]
    assert next(iter(compiled.state_dict())) == "_orig_mod.0.weight", "the user's own stays"
    result = train(task(made=lambda: torch.compile(net(), backend=backend)), ctx)
    assert result["history"]["loss"] == pytest.approx(alone(2)[0], rel=1e-5)
    found = module_of(result["content"])
    assert list(found.state_dict()) == list(net().state_dict())
    assert all(map(np.allclose, weights_of(found), alone(2)[1]))
    assert graphs


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of its compiler
@pytest.mark.parametrize(("batch_size", "graphs"), [(20, 2), (45, 1)], ids=["short", "lone row"])
@pytest.mark.parametrize("is_part", [False, True], ids=["module", "part"])
def test_short_last_batch_compiles_once_more_at_most_and_keys_are_plain(
    batch_size: int, graphs: int, is_part: bool
) -> None:
    counters: Any = import_module("torch._dynamo.utils").counters

    def made() -> Any:
        compiled = torch.compile(net(), backend="eager")
        return torch.nn.Sequential(compiled, torch.nn.Flatten()) if is_part else compiled

    torch.compiler.reset()
    counters.clear()
    ctx: Any = Alone(x=X.astype(np.float64), y=Y.astype(np.float64))
    module = module_of(train(task(made=made, batch_size=batch_size), ctx)["content"])
    assert counters["stats"]["unique_graphs"] <= max(graphs, 1 + is_part)
    keys = [f"0.{name}" if is_part else name for name in net().state_dict()]
    assert list(module.state_dict()) == keys


def test_model_dir_is_where_the_model_is_left(tmp_path: Path) -> None:
    asked = task(made=linear(3, 1_000), epochs=0, model_dir=str(tmp_path / "models"))
    result = train(asked, Alone(x=X, y=Y))  # type: ignore[arg-type]
    assert result["path"] == f"{tmp_path}/models/fit.pt"
    assert module_of(Path(result["path"]).read_bytes()).out_features == 1_000


def test_metrics_are_means_over_all_rows_whatever_the_batches() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    metrics = {
        "number": lambda output, label: float((output - label).abs().mean()),
        "array": lambda output, label: (output - label).abs().numpy(),
        "kept": torchmetrics.MeanAbsoluteError(),
    }
    asked = task(metrics=metrics, batch_size=20, optimizer=still, validates=True)
    history = train(asked, Alone(x=X, y=Y))["history"]  # type: ignore[arg-type]
    torch.manual_seed(SEED)
    with torch.no_grad():
        errors = net()(torch.tensor(X))[:, 0] - torch.tensor(Y)
    expected = errors.abs().mean().item()
    for name in metrics:
        assert history[name] == history[f"val_{name}"] == pytest.approx([expected] * 2, rel=1e-5)


def test_chief_prints_a_line_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    train(task(metrics={"mean": torch.nn.L1Loss()}), Alone(x=X, y=Y))  # type: ignore[arg-type]
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"Epoch 2/2 - loss: \d\.\d+ - mean: \d\.\d+", said[-1])
    assert len(said) == 2


def test_weights_of_rows_are_not_negative_and_floats_do_not_become_infinite() -> None:
    context: Any = Alone(x=X.tolist(), y=Y.tolist(), w=[1.0] * (len(X) - 1) + [-1.0])
    columns = Columns({"x": ""}, {"y": ""}, "w")
    with pytest.raises(FeedTypeError, match=r"column 'w' holds the weight -1.0: .*0 or more"):
        train(replace(task(), columns=columns), context)
    large: Any = Alone(x=(X.astype(np.float64) * 1e300).tolist(), y=Y.tolist())
    large.columns["x"] = np.array(large.columns["x"])
    with pytest.raises(FeedTypeError, match=r"e\+\d+, which does not fit in torch.float32"):
        train(task(), large)
