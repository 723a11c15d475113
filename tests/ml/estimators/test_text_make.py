"""Models of Transformers on one node, in this process: made, checked, trained on texts."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.columns import Columns
from sparkdl.ml.estimators.text_make import Head, MakeText, look_at_tokenizer
from sparkdl.ml.estimators.torch_train import TorchTask, train
from sparkdl.ml.scoring.source import Signature
from sparkdl.ml.scoring.text import TokenLoss
from sparkdl.ml.scoring.torch import module_of
from tests.doubles.lazy import Lazy, needs
from tests.ml.text_models import (
    LABELS,
    SEED,
    TEXTS,
    adam,
    bert_config,
    gpt2,
    gpt2_config,
    saved,
    tokenizer,
)
from tests.ml.torch_fits import Alone

torch: Any = Lazy("torch")
transformers: Any = Lazy("transformers")
pytestmark = [
    *(pytest.mark.torch, pytest.mark.usefixtures("lone_node"), needs("transformers", "lightning")),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),  # PyTorch's, of what Lightning asks it
]


def fitted(made: MakeText, labels: Any = TEXTS, loss: Any = "", **fields: Any) -> tuple[Any, ...]:
    """Train on all texts in each step; return the history, the module, and its output."""
    columns = Columns({"x": "text"}, {"y": ""})
    given = {"loss": loss or TokenLoss(), "batch_size": 4, "epochs": 12, "seed": SEED, **fields}
    task = TorchTask(columns=columns, name="fit", made=made, optimizer=adam, **given)
    result = train(task, Alone(x=TEXTS, y=labels))  # type: ignore[arg-type]
    signature = msgspec.json.decode(result["signature"], type=Signature)
    return result["history"], module_of(result["content"]), signature.outputs[0]


def test_classifier_learns_ragged_texts_and_scores_each_as_alone() -> None:
    made = MakeText(
        model=bert_config(), tokenizer=tokenizer, kind="classification", classes=2,
        names=("neg", "pos"),
    )  # fmt: skip
    labels = [int(label == "pos") for label in LABELS]
    history, module, output = fitted(made, labels, "CrossEntropyLoss", metrics=["accuracy"])
    assert history["accuracy"][-1] == 1.0
    assert output.is_logits
    assert not module.training
    assert module.model.config.label2id == {"neg": 0, "pos": 1}
    with torch.no_grad():
        alone = torch.cat([module([text]) for text in TEXTS])
        torch.testing.assert_close(module(TEXTS), alone, atol=1e-5, rtol=0)
        assert module(["film " * 99]).shape == (1, 2), "cut off where the model's positions end"


def test_decoder_regresses_with_the_padding_of_its_end() -> None:
    made = MakeText(
        model=gpt2_config(), tokenizer=tokenizer(eos_token="[EOS]"), kind="regression", classes=1
    )
    history, module, output = fitted(made, [float(len(text)) / 10 for text in TEXTS], "MSELoss")
    assert history["loss"][-1] < history["loss"][0] / 4
    assert output.shape == (None, 1)
    assert not output.is_logits
    with torch.no_grad():
        alone = torch.cat([module([text]) for text in TEXTS[:3]])
        torch.testing.assert_close(module(TEXTS)[:3], alone, atol=1e-5, rtol=0)


@pytest.mark.smoke
def test_language_model_learns_by_the_mean_of_all_tokens_and_continues_texts() -> None:
    model, own = gpt2()
    module: Any = MakeText(model=lambda: (model, own))()
    loss = TokenLoss()
    module.eval()
    with torch.no_grad():
        output = module(TEXTS)
        means = []
        for text in TEXTS:
            ids = torch.tensor([[*(own(text)["input_ids"] or [1]), own.eos_token_id]])
            means.append((float(model(input_ids=ids, labels=ids).loss), ids.shape[1] - 1))
    assert loss.parts(output) == sum(count for _, count in means)
    expected = sum(mean * count for mean, count in means) / loss.parts(output)
    assert float(loss(output, TEXTS)) == pytest.approx(expected, rel=1e-4)
    history, module, output = fitted(MakeText(model=gpt2), epochs=60)
    assert history["loss"][-1] < 0.3
    assert (output.name, output.dtype) == ("text", "string")
    assert module(["fine fine", "bad"]) == {"text": ["plot the end", "plot"]}


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"model": lambda: (transformers.BertLMHeadModel(bert_config()), tokenizer())},
         "BertLMHeadModel sees the tokens that it must predict"),
        ({"model": lambda: (transformers.BertModel(bert_config()), tokenizer())},
         "BertModel must have a head for language, and could not be run"),
        ({"model": gpt2, "kind": "classification", "classes": 2},
         r"GPT2LMHeadModel gives logits \['rows', 2, 14\], and classification needs"),
        ({"model": lambda: 7}, "gave a int and a NoneType: must be a model and a tokenizer"),
        ({"model": gpt2_config}, "gave a GPT2Config and a NoneType"),
        ({"model": lambda: (gpt2()[0], tokenizer(cls_token="[CLS]"))}, "neither pad_token nor eos"),
        ({"model": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=5, n_embd=4, n_layer=1, n_head=1)), "tokenizer": tokenizer},
         "tokenizer has 14 tokens, and GPT2LMHeadModel knows 5"),
        ({"model": gpt2, "max_length": 17}, "max_length=17: must be at most 16"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_the_first_row(given: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        MakeText(**given)()


def test_folder_gets_a_new_head_and_trains_in_full_precision(tmp_path: Path) -> None:
    folder = saved(tmp_path, transformers.BertModel(bert_config()).bfloat16())
    assert Head.in_folder(folder) == Head("BertModel", None)
    look_at_tokenizer(folder)
    module: Any = MakeText(model=folder, kind="classification", classes=5)()
    assert module(TEXTS).shape == (len(TEXTS), 5)
    assert all(part.training for part in module.modules())
    assert {each.dtype for each in module.parameters()} == {torch.float32}
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match=f"the folder '{folder}' has no tokenizer"):
        look_at_tokenizer(folder)
    with pytest.raises(ConfigError, match=r"must be a folder that model.save_pretrained"):
        Head.in_folder("bert-base-uncased")


@needs("peft")
@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["language", "classification"])
def test_lora_trains_few_weights_and_merges_them(kind: Any) -> None:
    is_language = kind == "language"
    labels = TEXTS if is_language else [0, 1, 0, 1, 1, 0]
    model = gpt2()[0] if is_language else transformers.BertForSequenceClassification(bert_config())
    made = MakeText(
        model=lambda: deepcopy(model), tokenizer=tokenizer, kind=kind, lora=True,
        classes=None if is_language else 2,
    )  # fmt: skip
    history, module, _ = fitted(made, labels, "" if is_language else "CrossEntropyLoss")
    assert history["loss"][-1] < history["loss"][0]
    before, after = model.state_dict(), module.model.state_dict()
    changed = {name for name, each in after.items() if not torch.equal(each, before.pop(name))}
    assert before == {}
    matrices = {name for name in after if "layer" in name or ".h." in name}
    matrices = {name for name in matrices if after[name].dim() == 2}
    heads = {name for name in after if name.startswith(("classifier", "bert.pooler.dense.weight"))}
    assert changed == matrices | heads, "embeddings, norms and biases are frozen"
