"""A model of Transformers with its tokenizer, as a module of PyTorch that takes text.

Runs in: driver, child, feeder
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from sparkdl.core.errors import ConfigError, in_words
from sparkdl.lightning import DualBase

if TYPE_CHECKING:
    import torch

Kind = Literal["classification", "regression", "language"]
_NEW_TOKENS = 32
"""The length of a continuation, unless the model's `generation_config` has `max_new_tokens`."""


class TextModel(DualBase):
    """A `torch.nn.Module` that tokenises texts, pads each batch to its longest one, and scores.

    Attributes:
        model: of Transformers: `.model.save_pretrained(folder)` saves it.
        tokenizer: that of the model.
        kind: `classification` and `regression` give logits `[rows, n]`. `language` gives the loss
            of each token while it trains, and continues the texts afterwards.
        max_length: the longest text in tokens, the rest is cut off; None for no limit.
    """

    _packages = ("torch",)
    _base = ".nn:Module"
    training: bool
    # PyTorch's own.
    eval: Any
    train: Any
    parameters: Any

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        kind: Kind,
        max_length: int | None = None,
        is_trained: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.tokenizer, self.kind = model, tokenizer, kind
        self.max_length, self.is_trained = max_length, is_trained

    def __reduce__(self) -> Any:
        given = (self.model, self.tokenizer, self.kind, self.max_length, self.is_trained)
        return _made, (*given, self.training)

    def forward(self, text: list[str]) -> Any:
        """Return the logits `[rows, n]`; of a language model what `kind` says."""
        if self.kind == "language" and self.is_trained:
            return {"text": self._continued(text)}
        is_language = self.kind == "language"
        side = "right" if is_language else self.tokenizer.padding_side
        tokens = self._padded(self._tokens(text, ends=is_language), side)
        logits = self.model(**tokens).logits
        return token_losses(logits, **tokens) if is_language else logits

    def end_training(self) -> None:
        """Merge LoRA's weights into those of the model; from now on `forward` scores."""
        if hasattr(self.model, "merge_and_unload"):
            self.model = self.model.merge_and_unload()
        self.is_trained = True

    def _tokens(self, text: list[str], ends: bool = False) -> list[list[int]]:
        limit, end = self.max_length, self.tokenizer.eos_token_id if ends else None
        cuts = {} if limit is None else {"truncation": True, "max_length": limit}
        found: list[list[int]] = self.tokenizer(list(text), **cuts)["input_ids"]
        if end is not None:  # else a language model never learns to end a text
            found = [
                each if each[-1:] == [end] or len(each) == limit else [*each, end] for each in found
            ]
        # A model needs a token, and an empty text may have none.
        return [each or [self.tokenizer.pad_token_id] for each in found]

    def _padded(self, ids: list[list[int]], side: str) -> dict[str, torch.Tensor]:
        import torch

        shape = len(ids), max(map(len, ids))
        tokens = torch.full(shape, self.tokenizer.pad_token_id)
        mask = torch.zeros(shape, dtype=torch.int64)
        for row, each in enumerate(ids):
            at = slice(len(each)) if side == "right" else slice(shape[1] - len(each), None)
            tokens[row, at], mask[row, at] = torch.tensor(each), 1
        device = next(self.parameters()).device
        return {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}

    def _continued(self, text: list[str]) -> list[str]:
        tokenizer, new = self.tokenizer, self.model.generation_config.max_new_tokens or _NEW_TOKENS
        room = None if self.max_length is None else max(1, self.max_length - new)
        ids = [each if room is None else each[-room:] for each in self._tokens(text)]
        tokens = self._padded(ids, "left")
        ids_of = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        made = self.model.generate(**tokens, **ids_of, max_new_tokens=new, do_sample=False)
        start = tokens["input_ids"].shape[1]
        found: list[str] = tokenizer.batch_decode(made[:, start:], skip_special_tokens=True)
        return found

    def check(self, classes: int | None) -> None:
        """Run the model on four tokens, so that one without the right head fails before the rows.

        Args:
            classes: the size of the head; None for a language model.

        Raises:
            ConfigError: if it fails, gives anything else, or sees the tokens that it must predict.
        """
        import torch

        name, known = type(self.model).__name__, self.model.get_input_embeddings().num_embeddings
        if len(self.tokenizer) > known:
            raise ConfigError(
                f"the tokenizer has {len(self.tokenizer)} tokens, and {name} knows {known}: give "
                f"the model's own tokenizer, or a config with vocab_size={len(self.tokenizer)}"
            )
        ids = torch.tensor([[0, 0], [0, known - 1]])
        was_training = self.training
        self.eval()
        try:
            with torch.no_grad():
                logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        except Exception as error:
            raise ConfigError(
                f"{name} must have a head that gives logits for {self.kind}, and running it failed "
                f"({in_words(error)}): give a model …ForSequenceClassification to learn labels, "
                "…ForCausalLM without label_col"
            ) from error
        finally:
            self.train(was_training)
        shape = tuple(logits.shape)
        if shape[1:] != ((2, shape[-1]) if classes is None else (classes,)):
            wanted = "[rows, tokens, words]" if classes is None else f"[rows, {classes}]"
            raise ConfigError(
                f"{name} gives logits {['rows', *shape[1:]]}, and {self.kind} needs {wanted}: give "
                "a model with such a head, or change label_col"
            )
        if classes is None and not torch.allclose(logits[0, 0], logits[1, 0], atol=1e-4):
            raise ConfigError(
                f"{name} sees the tokens that it must predict, and cannot be trained as a language "
                "model: set label_col, or give a model …ForCausalLM that is a decoder "
                "(is_decoder=True)"
            )


def _made(*parts: Any) -> TextModel:
    *given, is_training = parts
    made = TextModel(*given)
    made.training = is_training  # alone: parts of the model may differ
    return made


def token_losses(
    logits: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token but the first, `[rows, tokens - 1]`, and which ones count."""
    from torch.nn.functional import cross_entropy

    words = logits[:, :-1].float().transpose(1, 2)
    mask = attention_mask[:, 1:]
    return cross_entropy(words, input_ids[:, 1:], reduction="none") * mask, mask


class TokenLoss:
    """The mean loss of all tokens of a batch, for a `TextModel` of language."""

    def __call__(self, output: Any, label: Any) -> torch.Tensor:
        losses, mask = output
        mean: torch.Tensor = losses.sum() / mask.sum().clamp(min=1)
        return mean

    def parts(self, output: Any) -> float:
        """Return of how many tokens the loss is the mean."""
        return float(output[1].sum())
