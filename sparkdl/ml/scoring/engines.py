"""Engines: models for `predict` that are opened and closed, and those that generate text."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any, Protocol

from pyspark.sql.types import StringType, StructType

from sparkdl.core.errors import ConfigError
from sparkdl.values.ndarrays import Array

_RESULTS = ("text", "tokens", "finish_reason")


class Engine(Protocol):
    """What `predict` takes instead of a function that makes one; pickled before it is opened."""

    def open(self) -> None:
        """Load the model, in the process that scores."""

    def generate(self, columns: dict[str, Array]) -> Any:
        """Return the results of a batch, as the function of `make` does; may be `async`."""

    def close(self) -> None:
        """Free the model: another one replaces it, or the scorer ends. Not if it is killed."""


def is_engine(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("open", "generate", "close"))


@dataclass
class Generator:
    """What generates a text for each prompt; `sampling` has further options."""

    model: Any
    sampling: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = False

    def __post_init__(self) -> None:
        self._engine: Any = None
        self._tokenizer: Any = None
        for name in ("n", "num_return_sequences"):
            if self.sampling.get(name, 1) != 1:
                raise ConfigError(
                    f"{type(self).__name__}: {name}={self.sampling[name]!r} must be 1, for each "
                    "row has one text. Repeat the rows: df.withColumn('n', explode(sequence(…)))"
                )

    def _check(self, schema: StructType, names: Sequence[str], results: Sequence[str]) -> None:
        """Check the columns before anything starts."""
        if len(names) != 1 or not isinstance(schema[names[0]].dataType, StringType):
            raise ConfigError(
                f"input_cols={list(names)} must be one column of text, the prompts of "
                f"{type(self).__name__}: join columns with concat_ws"
            )
        if unknown := [name for name in results if name not in _RESULTS]:
            raise ConfigError(
                f"schema= names {', '.join(map(repr, unknown))}, and {type(self).__name__} gives "
                f"{', '.join(_RESULTS)}: write schema='text string, tokens int'"
            )

    def _templated(self, prompts: Array, **how: Any) -> list[Any]:
        """Return each prompt as a user's message in the model's chat template."""
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
        apply = self._tokenizer.apply_chat_template
        return [apply(each, add_generation_prompt=True, **how) for each in messages]

    def close(self) -> None:
        """Free the model."""
        shutdown = getattr(self._engine, "shutdown", None)
        self._engine = self._tokenizer = None
        if shutdown is not None:
            shutdown()


class VLLMEngine(Generator):
    """Texts by vLLM's `LLM`, for a column of prompts.

        predict(df, VLLMEngine("Qwen/Qwen3-8B", {"max_tokens": 64}), ["prompt"], "text string")

    Args:
        model: its name or folder.
        sampling: of vLLM's `SamplingParams`.
        options: of its `LLM`, such as `max_model_len`.
        chat: whether prompts are put into the model's chat template, as a user's messages.
    """

    def open(self) -> None:
        """Load the model."""
        from vllm import LLM, SamplingParams

        self._engine = LLM(model=self.model, **self.options)
        self._params = SamplingParams(**self.sampling)
        self._tokenizer = self._engine.get_tokenizer() if self.chat else None

    def _prompts(self, columns: Mapping[str, Array]) -> list[Any]:
        (prompts,) = columns.values()
        if not self.chat:
            return list(prompts)
        tokens = self._templated(prompts, tokenize=True, return_dict=False)
        # As tokens: vLLM would add special ones to a text, which the template has.
        return [{"prompt_token_ids": each} for each in tokens]

    def generate(self, columns: dict[str, Array]) -> Any:
        """Return the texts of a batch."""
        return _results(self._engine.generate(self._prompts(columns), self._params, use_tqdm=False))


class AsyncVLLMEngine(VLLMEngine):
    """Texts by vLLM's `AsyncLLMEngine`: up to 16 batches of a task are generated together.

    Args:
        model, sampling, chat: as `VLLMEngine` has them.
        options: of `AsyncEngineArgs`.
    """

    def open(self) -> None:
        """Start the engine."""
        from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        arguments = AsyncEngineArgs(model=self.model, **self.options)
        self._engine = AsyncLLMEngine.from_engine_args(arguments)
        kind = RequestOutputKind.FINAL_ONLY
        self._params = SamplingParams(**{"output_kind": kind, **self.sampling})

    async def generate(self, columns: dict[str, Array]) -> Any:
        """Return the texts of a batch; its other requests end with one that fails."""
        if self.chat and self._tokenizer is None:
            found = self._engine.get_tokenizer()
            self._tokenizer = await found if isawaitable(found) else found  # by version
        calls = [asyncio.create_task(self._last(each)) for each in self._prompts(columns)]
        try:
            return _results(await asyncio.gather(*calls))
        finally:
            for call in calls:
                call.cancel()

    async def _last(self, prompt: Any) -> Any:
        outputs = self._engine.generate(prompt, self._params, uuid.uuid4().hex)
        return [each async for each in outputs][-1]


def _results(outputs: Sequence[Any]) -> dict[str, list[Any]]:
    firsts = [each.outputs[0] for each in outputs]
    return {
        "text": [each.text for each in firsts],
        "tokens": [len(each.token_ids) for each in firsts],
        "finish_reason": [each.finish_reason for each in firsts],
    }


class TransformersEngine(Generator):
    """Texts by `generate` of Transformers, for a column of prompts.

    Args:
        model: its name or folder, or a function that returns model and tokenizer.
        sampling: of `generate`, such as `max_new_tokens`.
        options: of `from_pretrained`, such as `dtype`.
        chat: as `VLLMEngine` has it.
    """

    def open(self) -> None:
        """Load model and tokenizer."""
        import torch
        import transformers

        if callable(self.model):
            model, tokenizer = self.model()
        else:
            is_pair = transformers.AutoConfig.from_pretrained(self.model).is_encoder_decoder
            kind = f"AutoModelFor{'Seq2Seq' if is_pair else 'Causal'}LM"
            model = getattr(transformers, kind).from_pretrained(self.model, **self.options)
            tokenizer = transformers.AutoTokenizer.from_pretrained(self.model)
        if not model.config.is_encoder_decoder:
            tokenizer.padding_side = "left"  # what is generated follows the prompt
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        if torch.cuda.is_available() and not hasattr(model, "hf_device_map"):
            model = model.to("cuda")
        self._engine, self._tokenizer = model.eval(), tokenizer

    def generate(self, columns: dict[str, Array]) -> Any:
        """Return the texts of a batch."""
        import torch

        (prompts,) = columns.values()
        texts = self._templated(prompts, tokenize=False) if self.chat else list(prompts)
        given = self._tokenizer(
            texts, padding=True, return_tensors="pt", add_special_tokens=not self.chat
        ).to(self._engine.device)
        inputs = {name: given[name] for name in ("input_ids", "attention_mask")}
        with torch.inference_mode():
            found = self._engine.generate(**inputs, **self.sampling)
        is_pair = self._engine.config.is_encoder_decoder
        found = found[:, 1 if is_pair else inputs["input_ids"].shape[1] :]
        ends = self._engine.generation_config.eos_token_id
        ends = {*ends} if isinstance(ends, list) else {ends}
        stops = [next((i for i, t in enumerate(row) if t in ends), None) for row in found.tolist()]
        return {
            "text": self._tokenizer.batch_decode(found, skip_special_tokens=True),
            "tokens": [found.shape[1] if stop is None else stop + 1 for stop in stops],
            "finish_reason": ["length" if stop is None else "stop" for stop in stops],
        }
