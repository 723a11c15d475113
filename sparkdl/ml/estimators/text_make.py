"""A model of Transformers on a node: made of a folder, a config, a model or a function, with LoRA.

Runs in: child. The driver looks at folders, too.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pyarrow.fs as pafs

from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.core.files import scratch_folder
from sparkdl.ml.scoring.source import ModelSource
from sparkdl.ml.scoring.text import Kind, TextModel
from sparkdl.ml.scoring.torch import module_of, plain
from sparkdl.storage.systems import locate, open_storage


@dataclass(frozen=True, kw_only=True)
class MakeText:
    """Makes the `TextModel` of a fit, on each node.

    Attributes:
        model: a folder, a config, a saved model, or a function that returns a model, or a model
            and its tokenizer.
        tokenizer: itself, its folder, or a function that makes it; None for the model's.
        classes: the size of the head; None for a language model.
        names: the labels of the classes, where they are text.
        lora: `True`, or a config of peft.
    """

    model: Any
    tokenizer: Any = None
    kind: Kind = "language"
    classes: int | None = None
    names: tuple[str, ...] = ()
    lora: Any = None
    max_length: int | None = None

    def __call__(self) -> TextModel:
        """Return the module, ready to train.

        Raises:
            ConfigError: if model, tokenizer and labels do not fit each other.
            FrameworkMissingError: without Transformers, or peft.
        """
        with ExitStack() as stack:
            model, tokenizer = self._parts(stack)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token_id is None:
            raise ConfigError(
                "the tokenizer has neither pad_token nor eos_token, and batches must be padded: "
                "set tokenizer.pad_token"
            )
        config, known = model.config, getattr(model.config, "max_position_embeddings", None)
        config.pad_token_id = tokenizer.pad_token_id
        if self.names:
            config.id2label = dict(enumerate(self.names))
            config.label2id = {name: number for number, name in config.id2label.items()}
        limit = self.max_length or tokenizer.model_max_length
        if self.max_length is not None and known is not None and limit > known:
            raise ConfigError(
                f"max_length={limit}: must be at most {known}, the positions that the model has"
            )
        limit = min(limit, known or limit)
        # A tokenizer without a limit has a huge one.
        made = TextModel(model, tokenizer, self.kind, limit if limit < 1 << 30 else None)
        made.check(self.classes)
        if self.lora:
            made.model = self._with_lora(model)
        made.train()  # models of a folder come in the mode that scores
        return made

    def _parts(self, stack: ExitStack) -> tuple[Any, Any]:
        try:
            library: Any = import_module("transformers")
        except ImportError as error:
            raise FrameworkMissingError(
                f"Transformers cannot be imported: {error}. Install it here and on the executors: "
                "pip install transformers"
            ) from error
        library.utils.logging.disable_progress_bar()
        head = "CausalLM" if self.kind == "language" else "SequenceClassification"
        auto = getattr(library, f"AutoModelFor{head}")
        model, tokenizer = self.model, self.tokenizer
        if isinstance(model, ModelSource):
            model = module_of(model.given)
        elif isinstance(model, str):
            tokenizer = model if tokenizer is None else tokenizer
            folder = stack.enter_context(_local(model))
            config = self._headed(_called(library.AutoConfig.from_pretrained, folder))
            # Small steps would be lost in half precision; the Trainer's `precision` is faster.
            model = _called(auto.from_pretrained, folder, config=config, dtype="float32")
        elif callable(model):
            model = model()
            own = model if isinstance(model, tuple) else (model, None)
            model, tokenizer = own[0], own[1] if tokenizer is None else tokenizer
        else:
            model = _called(auto.from_config, self._headed(deepcopy(model)))
        if isinstance(tokenizer, str):
            folder = stack.enter_context(_local(tokenizer))
            tokenizer = _called(library.AutoTokenizer.from_pretrained, folder)
        base = library.PreTrainedTokenizerBase
        if callable(tokenizer) and not isinstance(tokenizer, base):
            tokenizer = tokenizer()
        model = plain(model)
        if not isinstance(model, library.PreTrainedModel) or not isinstance(tokenizer, base):
            raise ConfigError(
                f"model= and tokenizer= gave a {type(model).__name__} and a "
                f"{type(tokenizer).__name__}: must be a model and a tokenizer of Transformers; "
                "set tokenizer=, or return (model, tokenizer) from the function"
            )
        return model, tokenizer

    def _headed(self, config: Any) -> Any:
        if self.classes is not None:
            config.num_labels = self.classes
        return config

    def _with_lora(self, model: Any) -> Any:
        check_lora()
        peft: Any = import_module("peft")
        task = "CAUSAL_LM" if self.kind == "language" else "SEQ_CLS"
        config = peft.LoraConfig(task_type=task, target_modules="all-linear")
        with warnings.catch_warnings():  # of GPT-2's layers, and of what Transformers renamed
            warnings.filterwarnings("ignore", "fan_in_fan_out|.*is_gradient_checkpointing")
            return peft.get_peft_model(model, config if self.lora is True else self.lora)


def check_lora() -> None:
    if find_spec("peft") is None:
        raise FrameworkMissingError(
            "lora= needs peft, here and on the executors: pip install peft. Or leave out lora to "
            "train all weights"
        )


def adamw(parameters: Any) -> Any:
    """Make the optimizer of a fit that sets none, at the rate of Transformers' `Trainer`."""
    from torch.optim import AdamW

    return AdamW(parameters, 5e-5)


def _called(load: Callable[..., Any], given: Any, **options: Any) -> Any:
    try:
        return load(given, **options)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        text = str(error).strip().partition("\n")[0].rstrip(".")
        what = given if isinstance(given, str) else f"a {type(given).__name__}"
        raise ConfigError(
            f"Transformers cannot make a model or tokenizer of {what}: {text}. Give a folder that "
            "model.save_pretrained and tokenizer.save_pretrained wrote, with a head for the labels"
        ) from error


@contextmanager
def _local(path: str) -> Iterator[str]:
    """Give a folder at any place as one of this machine: a copy, if it is elsewhere."""
    storage, inner = locate(path)
    with scratch_folder() as folder:
        if not storage.uri.startswith("file:"):
            pafs.copy_files(inner, str(folder), open_storage(storage), pafs.LocalFileSystem())
            inner = str(folder)
        yield inner


@dataclass(frozen=True)
class Head:
    """A model's head, as far as the driver looks at it.

    Attributes:
        architecture: the model's class; empty if it is unknown.
        classes: the labels by number; None if the model has no head for them.
    """

    architecture: str
    classes: tuple[str, ...] | None

    @classmethod
    def of(cls, architecture: str, labels: Any) -> Head:
        """Return the head of a model with these `id2label`; by default Transformers' are two."""
        if not architecture.endswith("ForSequenceClassification"):
            return cls(architecture, None)
        names = {int(number): str(name) for number, name in (labels or {0: "", 1: ""}).items()}
        return cls(architecture, tuple(names[number] for number in sorted(names)))

    @classmethod
    def in_folder(cls, path: str) -> Head:
        """Return the head of a model's folder, checked without Transformers, before nodes start."""
        storage, inner = locate(path)
        if "config.json" not in _names_in(path):
            raise ConfigError(
                f"model={path!r}: must be a folder that model.save_pretrained(folder) wrote, with "
                "a config.json, and that driver and nodes can read; a hub's names are not looked up"
            )
        with open_storage(storage).open_input_stream(f"{inner}/config.json") as file:
            config: dict[str, Any] = json.loads(file.read())
        return cls.of((config.get("architectures") or [""])[0], config.get("id2label"))

    @property
    def is_causal(self) -> bool:
        """Whether it may be that of a language model; a node runs the model to find out."""
        _, is_headed, task = self.architecture.partition("For")
        return not is_headed or task in ("CausalLM", "ConditionalGeneration")


def look_at_tokenizer(path: str) -> None:
    """Check a tokenizer's folder: of one without files, Transformers makes an empty tokenizer."""
    if not any(name.startswith(("tokenizer", "vocab")) for name in _names_in(path)):
        raise ConfigError(
            f"the folder {path!r} has no tokenizer: add it by tokenizer.save_pretrained(folder), "
            "or set tokenizer="
        )


def _names_in(path: str) -> set[str]:
    storage, inner = locate(path)
    found = pafs.FileSelector(inner, allow_not_found=True)
    return {info.base_name for info in open_storage(storage).get_file_info(found)}
