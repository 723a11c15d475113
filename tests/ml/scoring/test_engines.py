"""Engines: Transformers' `generate` on a tiny model, and vLLM's API on a stand-in for it."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
from pyspark.sql import types as t

from sparkdl import AsyncVLLMEngine, TransformersEngine, VLLMEngine
from sparkdl.core.errors import ConfigError, InferenceError
from sparkdl.ml.scoring import loaded
from sparkdl.ml.scoring.columns import OutputColumn
from sparkdl.ml.scoring.engines import Engine
from sparkdl.ml.scoring.inputs import InputColumn
from sparkdl.ml.scoring.source import ANY, Tensor, source_of_content
from sparkdl.ml.scoring.task import Score

CALLS: list[Any] = []
Scored = Callable[..., list[dict[str, Any]]]
WORDS = ["<pad>", "<end>", "<user>", "red", "green", "blue"]


@pytest.fixture
def scored() -> Iterator[Scored]:
    """Score prompts with an engine, which travels by pickle."""
    CALLS.clear()

    def rows(engine: Engine, *prompts: str, **how: Any) -> list[dict[str, Any]]:
        made = cloudpickle.dumps((engine, ("text", "tokens", "finish_reason")))
        kinds = {"text": pa.string(), "tokens": pa.int32(), "finish_reason": pa.string()}
        outputs = tuple(OutputColumn(name, name, kinds[name], "function") for name in kinds)
        inputs = (InputColumn("p", Tensor("p", ANY, None)),)
        source = source_of_content(made, "function")
        score = Score(source, "it", inputs, outputs, 2, "error", **how)
        arrays = score.structs(iter([pa.array(prompts)]))
        return [row for array in arrays for row in array.to_pylist()]

    yield rows
    loaded._loaded.clear()
    gc.unfreeze()  # as before another model


@dataclass
class Counting:
    """An engine of a user's."""

    name: str

    def open(self) -> None:
        sys.modules[__name__].CALLS.append(f"open {self.name}")

    def generate(self, columns: dict[str, Any]) -> Any:
        texts = [text.upper() for text in columns["p"]]
        return {"text": texts, "tokens": [1] * len(texts), "finish_reason": ["stop"] * len(texts)}

    def close(self) -> None:
        sys.modules[__name__].CALLS.append(f"close {self.name}")


def test_engine_is_opened_once_and_closed_when_another_replaces_it(scored: Scored) -> None:
    for _ in range(2):
        assert [row["text"] for row in scored(Counting("a"), "x", "y", "z")] == ["X", "Y", "Z"]
    assert scored(Counting("b"), "x")[0]["text"] == "X"
    loaded._loaded.clear()
    assert CALLS == ["open a", "close a", "open b", "close b"]


# vLLM's API: https://docs.vllm.ai/en/stable/api/vllm


class Params(SimpleNamespace):
    def __init__(self, max_tokens: int = 16, n: int = 1, output_kind: int = 0) -> None:
        super().__init__(max_tokens=max_tokens, n=n, output_kind=output_kind)


def answer(prompt: Any, params: Params) -> Any:
    CALLS.append(prompt)
    words = prompt.split() if isinstance(prompt, str) else prompt["prompt_token_ids"]
    if not words:
        raise ValueError("The decoder prompt cannot be empty")
    words = list(map(str, reversed(words)))[: params.max_tokens]
    reason = "length" if len(words) == params.max_tokens else "stop"
    one = SimpleNamespace(text=" ".join(words), token_ids=words, finish_reason=reason)
    return SimpleNamespace(outputs=[one])


class Tokenizer:
    def apply_chat_template(self, messages: Any, **how: Any) -> list[int]:
        assert how == {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return [9, *map(int, messages[0]["content"].split())]


class LLM:
    def __init__(self, model: str, max_model_len: int = 10) -> None:
        assert (model, max_model_len) == ("tiny", 20)

    def get_tokenizer(self) -> Tokenizer:
        return Tokenizer()

    def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool = True) -> list[Any]:
        return [answer(each, sampling_params) for each in prompts]


class AsyncLLM(LLM):
    running = 0

    @classmethod
    def from_engine_args(cls, arguments: dict[str, Any]) -> AsyncLLM:
        return cls(**arguments)

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> Any:  # type: ignore[override]
        assert sampling_params.output_kind == 2
        AsyncLLM.running += 1
        try:
            if prompt == "slow":
                await asyncio.sleep(60)
            await asyncio.sleep(0)
            yield answer(prompt, sampling_params)
        finally:
            AsyncLLM.running -= 1

    def shutdown(self) -> None:
        CALLS.append("shutdown")


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    it, sampling = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    engines = {"LLM": LLM, "AsyncLLMEngine": AsyncLLM, "AsyncEngineArgs": dict}
    it.__dict__.update(engines, SamplingParams=Params)
    sampling.__dict__.update(RequestOutputKind=SimpleNamespace(FINAL_ONLY=2))
    monkeypatch.setitem(sys.modules, "vllm", it)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("kind", [VLLMEngine, AsyncVLLMEngine])
def test_vllm_answers_in_order_and_names_errors(scored: Scored, kind: type[VLLMEngine]) -> None:
    engine = kind("tiny", {"max_tokens": 2}, {"max_model_len": 20})
    found = scored(engine, "a b c", "d", "", "e f", error_col="why")
    assert [row["text"] for row in found] == ["c b", "d", None, "f e"]
    assert [row["tokens"] for row in found] == [2, 1, None, 2]
    assert [row["finish_reason"] for row in found] == ["length", "stop", None, "length"]
    assert found[2]["why"] == "ValueError: The decoder prompt cannot be empty"
    chat = kind("tiny", {"max_tokens": 9}, {"max_model_len": 20}, chat=True)
    assert [row["text"] for row in scored(chat, "1 2", "3")] == ["2 1 9", "3 9"]
    assert CALLS[-2:] == [{"prompt_token_ids": [9, 1, 2]}, {"prompt_token_ids": [9, 3]}]
    assert CALLS.count("shutdown") == (kind is AsyncVLLMEngine)


@pytest.mark.usefixtures("vllm")
def test_requests_of_a_batch_that_fails_are_cancelled(scored: Scored) -> None:
    engine = AsyncVLLMEngine("tiny", {}, {"max_model_len": 20})
    with pytest.raises(InferenceError, match="rows 0 to 1: ValueError"):
        scored(engine, "slow", "")
    assert AsyncLLM.running == 0


# Transformers


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, and a tokenizer of a few words."""
    transformers, torch = map(pytest.importorskip, ("transformers", "torch"))
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}> {{ m.content }}{% endfor %}"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "vocab_size": len(WORDS), "eos_token_id": 1}
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.torch
def test_transformers_generates_what_it_does_for_a_prompt_alone(tiny: Path, scored: Scored) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompts = ["red", "red green blue green", "blue blue"]
    model = AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    options = {"max_new_tokens": 5, "do_sample": False}

    def alone(prompt: str) -> list[int]:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        return list(model.generate(ids, pad_token_id=0, **options)[0, ids.shape[1] :].tolist())

    def check(found: list[dict[str, Any]], given: list[str]) -> None:
        tokens = [alone(prompt) for prompt in given]
        texts = [tokenizer.decode(each, skip_special_tokens=True) for each in tokens]
        assert [row["text"] for row in found] == texts
        assert [row["tokens"] for row in found] == list(map(len, tokens))
        reasons = ["stop" if each[-1] == 1 else "length" for each in tokens]
        assert [row["finish_reason"] for row in found] == reasons

    check(scored(TransformersEngine(str(tiny), options), *prompts), prompts)
    chat = TransformersEngine(lambda: (model, tokenizer), options, chat=True)
    check(scored(chat, *prompts), [f"<user> {prompt}" for prompt in prompts])


def test_columns_that_an_engine_does_not_have_are_refused() -> None:
    engine = TransformersEngine("tiny")
    text, number = t.StructField("p", t.StringType()), t.StructField("n", t.LongType())
    schema = t.StructType([text, number])
    engine._check(schema, ["p"], ["text", "tokens"])
    for names in (["p", "n"], ["n"]):
        with pytest.raises(ConfigError, match=r"input_cols=\[.*'n'\] must be one column of text"):
            engine._check(schema, names, ["text"])
    with pytest.raises(ConfigError, match="names 'answer', and TransformersEngine gives text, tok"):
        engine._check(schema, ["p"], ["answer"])
    with pytest.raises(ConfigError, match="n=2 must be 1"):
        VLLMEngine("tiny", {"n": 2})
