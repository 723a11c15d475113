"""A model of Transformers on a node: made of a folder, a config, a model or a function, with LoRA.

Runs in: child. Folders are looked at in the driver as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs

from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.core.files import scratch_folder
from sparkdl.ml.scoring.text import Kind, TextModel
from sparkdl.ml.scoring.torch import module_of, plain
from sparkdl.storage.systems import locate, open_storage

_RATE = 5e-5


@dataclass(frozen=True)
class MakeText:
    """Makes the `TextModel` of a fit, on each node.

    Attributes:
        model: a folder, a config, a pickled model, or a function that returns a model, or a model
            and its tokenizer.
        tokenizer: itself, its folder, or a function that makes it; None for the model's.
        classes: the size of the head; None for a language model.
        names: the labels of the classes, where they are text.
        lora: `True`, or a config of peft.
    """

    model: str | bytes | Callable[[], Any] | Any
    tokenizer: Any
    kind: Kind
    classes: int | None
    names: tuple[str, ...] = ()
    lora: Any = None
    max_length: int | None = None

    def __call__(self) -> TextModel:
        """Return the module, ready to train.

        Raises:
            ConfigError: if model, tokenizer and labels do not fit each other.
            FrameworkMissingError: without Transformers, or peft.
        """
        model, tokenizer = self._parts()
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token_id is None:
            raise ConfigError(
                "the tokenizer has neither pad_token nor eos_token, and batches must be padded: "
                "set tokenizer.pad_token"
            )
        config = model.config
        config.pad_token_id = tokenizer.pad_token_id
        if self.names:
            config.id2label = dict(enumerate(self.names))
            config.label2id = {name: number for number, name in enumerate(self.names)}
        made = TextModel(model, tokenizer, self.kind, self._limit(tokenizer, config))
        made.check(self.classes)
        if self.lora:
            made.model = with_lora(model, self.lora, self.kind)
        made.train()  # models of a folder come in the mode that scores
        return made

    def _parts(self) -> tuple[Any, Any]:
        library = transformers()
        tokenizer = self.tokenizer
        with ExitStack() as stack:
            if isinstance(self.model, bytes):
                model = module_of(self.model)
            elif isinstance(self.model, str):
                folder = stack.enter_context(_local(self.model))
                tokenizer = folder if tokenizer is None else tokenizer
                model = self._loaded(library, folder)
            elif callable(self.model):
                model = self.model()
                if isinstance(model, tuple):
                    model, own = model
                    tokenizer = own if tokenizer is None else tokenizer
            else:
                config = self._headed(deepcopy(self.model))
                model = _called(self._auto(library).from_config, config, type(config).__name__)
            model = plain(model)
            if not isinstance(model, library.PreTrainedModel):
                raise ConfigError(
                    f"the function that makes the model returned a {type(model).__name__}: must be "
                    "a model of Transformers, or (model, tokenizer)"
                )
            return model, _tokenizer(library, tokenizer, stack)

    def _auto(self, library: Any) -> Any:
        is_language = self.kind == "language"
        name = "AutoModelForCausalLM" if is_language else "AutoModelForSequenceClassification"
        return getattr(library, name)

    def _headed(self, config: Any) -> Any:
        if self.classes is not None:
            config.num_labels = self.classes
        return config

    def _loaded(self, library: Any, folder: str) -> Any:
        library.utils.logging.disable_progress_bar()
        config = self._headed(_called(library.AutoConfig.from_pretrained, folder, self.model))
        auto = self._auto(library)

        def load(path: str) -> Any:
            # Small steps would be lost in weights of half precision; `precision` makes them fast.
            return auto.from_pretrained(path, config=config, dtype="float32")

        return _called(load, folder, self.model)

    def _limit(self, tokenizer: Any, config: Any) -> int | None:
        known = getattr(config, "max_position_embeddings", None)
        if self.max_length is not None and known is not None and self.max_length > known:
            raise ConfigError(
                f"max_length={self.max_length}: must be at most {known}, the positions that the "
                "model has"
            )
        limits = [self.max_length or tokenizer.model_max_length, known]
        limit = min(each for each in limits if each is not None)
        return limit if limit < 1 << 30 else None  # a tokenizer's number for no limit


def transformers() -> Any:
    try:
        return import_module("transformers")
    except ImportError as error:
        raise FrameworkMissingError(
            f"Transformers cannot be imported: {error}. Install it here and on the executors: pip "
            "install transformers"
        ) from error


def check_lora() -> None:
    if find_spec("peft") is None:
        raise FrameworkMissingError(
            "lora= needs peft, here and on the executors: pip install peft. Or leave out lora to "
            "train all weights"
        )


def with_lora(model: Any, lora: Any, kind: Kind) -> Any:
    """Return the model with small trained matrices beside its frozen weights."""
    check_lora()
    peft = import_module("peft")
    if lora is True:
        task = "CAUSAL_LM" if kind == "language" else "SEQ_CLS"
        lora = peft.LoraConfig(task_type=task, target_modules="all-linear")
    return peft.get_peft_model(model, lora)


def _tokenizer(library: Any, given: Any, stack: ExitStack) -> Any:
    if isinstance(given, Path):
        given = str(given)
    if isinstance(given, str):
        folder = stack.enter_context(_local(given))
        return _called(library.AutoTokenizer.from_pretrained, folder, given)
    if not isinstance(given, library.PreTrainedTokenizerBase) and callable(given):
        given = given()
    if not isinstance(given, library.PreTrainedTokenizerBase):
        raise ConfigError(
            f"tokenizer={given!r}: must be a tokenizer of Transformers, its folder, or a function "
            "that makes it; a folder of model= may hold it, and a function may return (model, "
            "tokenizer)"
        )
    return given


def _called(load: Callable[[Any], Any], given: Any, what: Any) -> Any:
    try:
        return load(given)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        text = str(error).strip().partition("\n")[0]
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

    @property
    def is_causal(self) -> bool:
        """Whether it may be that of a language model, which a node finds out by running it."""
        _, is_headed, task = self.architecture.partition("For")
        return not is_headed or task in ("CausalLM", "ConditionalGeneration")


def look_at(path: str, has_tokenizer: bool) -> Head:
    """Check a folder without Transformers, before nodes start."""
    storage, inner = locate(path)
    system = open_storage(storage)
    found = system.get_file_info(pafs.FileSelector(inner, allow_not_found=True))
    names = {info.base_name for info in found}
    if "config.json" not in names:
        raise ConfigError(
            f"model={path!r}: there must be a folder with a config.json, as "
            "model.save_pretrained(folder) writes it, that driver and nodes can read; nothing is "
            "downloaded from a hub"
        )
    if not has_tokenizer and not any(_is_of_tokenizer(name) for name in names):
        raise ConfigError(
            f"model={path!r}: the folder has no tokenizer: add it by "
            "tokenizer.save_pretrained(folder), or set tokenizer="
        )
    try:
        with system.open_input_stream(f"{inner}/config.json") as file:
            config: dict[str, Any] = json.loads(file.read())
    except ValueError as error:
        raise ConfigError(
            f"model={path!r}: its config.json cannot be read: {error}. Save the model again"
        ) from error
    architecture = (config.get("architectures") or [""])[0]
    return Head.of(architecture, config.get("id2label"))


def _is_of_tokenizer(name: str) -> bool:
    return name.startswith(("tokenizer", "vocab", "spiece", "sentencepiece", "tekken"))


def adamw(parameters: Any) -> Any:
    """Return the optimizer of a fit that sets none, at the rate of Transformers' `Trainer`."""
    from torch.optim import AdamW

    return AdamW(parameters, _RATE)
