"""Tiny models of Transformers and their tokenizer, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.doubles.lazy import Lazy

transformers: Any = Lazy("transformers")
tokenizers: Any = Lazy("tokenizers")
WORDS = ["a", "good", "great", "fine", "film", "bad", "poor", "dull", "plot", "the", "end"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def tokenizer(**marks: str) -> Any:
    """Make a tokenizer of whole words, by default with marks of padding and of the end."""
    marks = marks or {"pad_token": "[PAD]", "eos_token": "[EOS]"}
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *marks.values(), *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", **marks)


def bert_config(**given: Any) -> Any:
    sizes = {**SIZES, "intermediate_size": 16, "max_position_embeddings": 16}
    return transformers.BertConfig(**{"vocab_size": len(WORDS) + 3, **sizes, **given})


def gpt2_config() -> Any:
    return transformers.GPT2Config(vocab_size=len(WORDS) + 3, n_embd=16, n_layer=1, n_head=2)


def saved(folder: Path, model: Any, own: Any = None) -> str:
    """Save a model, and its tokenizer beside it."""
    model.save_pretrained(folder)
    (own or tokenizer()).save_pretrained(folder)
    return str(folder)
