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
        kind: `classification` and `regression` give logits `[rows, n]`. `language` gives the loss
            of each token while it trains, and continues the texts afterwards.
        max_length: the tokens after which a text is cut off; None for no limit.
    """

    _packages = ("torch",)
    _base = ".nn:Module"
    # PyTorch's own.
    training: bool
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
        return TextModel, given, {"training": self.training}

    def forward(self, text: list[str]) -> Any:
        """Return what `kind` says; of a language model that trains, see `TokenLoss`."""
        if self.kind != "language":
            ids = self._tokens(text, self.max_length)
            return self.model(**self._padded(ids, self.tokenizer.padding_side)).logits
        if self.is_trained:
            return {"text": self._continued(text)}
        from torch.nn.functional import cross_entropy

        end, limit = self.tokenizer.eos_token_id, self.max_length
        ids = [
            # Without an end, the model never learns to end a text.
            each if end is None or each[-1] == end or len(each) == limit else [*each, end]
            for each in self._tokens(text, limit)
        ]
        tokens = self._padded(ids, "right")
        logits = self.model(**tokens).logits[:, :-1].float().transpose(1, 2)
        mask = tokens["attention_mask"][:, 1:]
        return cross_entropy(logits, tokens["input_ids"][:, 1:], reduction="none") * mask, mask

    def end_training(self) -> None:
        """Merge LoRA's weights into those of the model; from now on `forward` scores."""
        if hasattr(self.model, "merge_and_unload"):
            self.model = self.model.merge_and_unload()
        self.is_trained = True

    def _tokens(self, text: list[str], limit: int | None) -> list[list[int]]:
        cuts = {} if limit is None else {"truncation": True, "max_length": limit}
        found = self.tokenizer(list(text), **cuts)["input_ids"]
        return [each or [self.tokenizer.pad_token_id] for each in found]  # a model needs a token

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
        ids = self._tokens(text, None)
        if (known := getattr(self.model.config, "max_position_embeddings", None)) is not None:
            new = min(new, known // 2)
            ids = [each[new - known :] for each in ids]
        tokens = self._padded(ids, "left")
        ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        made = self.model.generate(**tokens, **ends, max_new_tokens=new, do_sample=False)
        start = tokens["input_ids"].shape[1]
        found: list[str] = tokenizer.batch_decode(made[:, start:], skip_special_tokens=True)
        return found

    def check(self, classes: int | None) -> None:
        """Run the model on two tokens, so that one without the right head fails before the rows.

        Args:
            classes: the size of the head; None for a language model.

        Raises:
            ConfigError: if it fails, gives anything else, or sees the tokens that it must predict.
        """
        import torch

        name, known = type(self.model).__name__, self.model.get_input_embeddings()
        if len(self.tokenizer) > known.num_embeddings:
            raise ConfigError(
                f"the tokenizer has {len(self.tokenizer)} tokens, and {name} knows "
                f"{known.num_embeddings}: give the model's own, or a config with that vocab_size"
            )
        given = known(torch.tensor([[0, 1]])).detach().requires_grad_()
        self.eval()
        try:
            logits = self.model(inputs_embeds=given, attention_mask=torch.ones(1, 2)).logits
        except Exception as error:
            raise ConfigError(
                f"{name} must have a head for {self.kind}, and could not be run ({in_words(error)})"
                ": give a …ForSequenceClassification to learn labels, else a …ForCausalLM"
            ) from error
        wanted = (2, logits.shape[-1]) if classes is None else (classes,)
        if logits.shape[1:] != wanted:
            raise ConfigError(
                f"{name} gives logits {['rows', *logits.shape[1:]]}, and {self.kind} needs "
                f"{['rows', *wanted]}: give a model with such a head, or change label_col"
            )
        if classes is None:
            (seen,) = torch.autograd.grad(logits[0, 0].square().sum(), given)
            if seen[0, 1].any():
                raise ConfigError(
                    f"{name} sees the tokens that it must predict, and cannot be trained as a "
                    "language model: set label_col, or give a …ForCausalLM (is_decoder=True)"
                )


class TokenLoss:
    """The mean loss of all tokens of a batch, for a `TextModel` of language.

    Its output is the loss of each token but the first, `[rows, tokens - 1]`, and which ones count.
    """

    def __call__(self, output: Any, label: Any) -> torch.Tensor:
        losses, mask = output
        mean: torch.Tensor = losses.sum() / mask.sum().clamp(min=1)
        return mean

    def parts(self, output: Any) -> float:
        """Return of how many tokens the loss is the mean."""
        return float(output[1].sum())
