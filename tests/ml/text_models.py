"""Tiny models of Transformers with their tokenizer, and texts to train them with.

Here, and not beside the tests, for whoever runs a function imports its module.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.doubles.lazy import Lazy

transformers: Any = Lazy("transformers")
tokenizers: Any = Lazy("tokenizers")
WORDS = ["a", "good", "great", "fine", "film", "bad", "poor", "dull", "plot", "the", "end"]
TEXTS = ["a good film", "bad plot", "great", "", "the end of a dull film", "fine fine plot the end"]
LABELS = ["pos", "neg", "pos", "neg", "neg", "pos"]
SEED = 3


def tokenizer(**marks: str) -> Any:
    """Make a tokenizer of whole words, by default with marks of padding and of the end."""
    marks = marks or {"pad_token": "[PAD]", "eos_token": "[EOS]"}
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *marks.values(), *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", **marks)


def bert_config(**given: Any) -> Any:
    """Make a config without dropout, so that a training can be repeated on other nodes."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16, "max_position_embeddings": 16, "vocab_size": 14}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertConfig(**{**sizes, **still, **given})


def gpt2_config() -> Any:
    return transformers.GPT2Config(vocab_size=14, n_embd=16, n_layer=1, n_head=2, n_positions=16)


def gpt2() -> tuple[Any, Any]:
    return transformers.GPT2LMHeadModel(gpt2_config()), tokenizer()


def saved(folder: Path, model: Any) -> str:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def adam(parameters: Any) -> Any:
    """Make an optimizer that learns these texts in a few steps."""
    import torch

    return torch.optim.Adam(parameters, 0.02)


def die_once(marker: Path, at: int) -> list[Any]:
    """Return a callback that kills the last node at the end of epoch `at`, before it is saved."""
    from lightning.pytorch.callbacks import LambdaCallback

    def die(trainer: Any, _: Any) -> None:
        if trainer.current_epoch == at and trainer.global_rank == trainer.world_size - 1:
            with suppress(FileExistsError):
                marker.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)

    return [LambdaCallback(on_train_epoch_end=die)]
