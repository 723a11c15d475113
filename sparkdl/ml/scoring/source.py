"""A saved model's location, format, inputs and outputs."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from sparkdl.core.errors import ConfigError

Format = Literal["saved_model", "keras", "module", "function"]
NUMBER = "number"
"""The dtype of an input that takes whatever numbers come."""
ANY = "any"
"""The dtype of an input that takes whatever comes."""
SPARK_FILE = "spark-file:"
"""Before the name of a file that Spark copies to executors, as a path of a model."""
_UNCHOSEN = re.compile(r"(output|input|inputs|input_layer|keras_tensor|args|.+_input)(_\d+)?")
"""Names that Keras and TensorFlow give by themselves."""


@dataclass(frozen=True)
class Tensor:
    """An input or output of a model.

    Attributes:
        dtype: numpy's name, or `string` for text and bytes; `NUMBER` or `ANY` where it is open.
        shape: the first axis is the rows, None; further ones are None where they vary. None if not
            even their number is known.
        is_softmax, is_logits: whether the values of a row are probabilities or logits of classes,
            as far as the framework says it.
        classes: the labels of the classes, where they are text.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None
    is_softmax: bool = False
    is_logits: bool = False
    classes: tuple[str, ...] = ()

    def __str__(self) -> str:
        dims = "…" if self.shape is None else ", ".join(str(n or "?") for n in self.shape)
        return f"{self.name} ({self.dtype} [{dims}])"


def only_one(asked: Sequence[str], tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a model's only input or output if a single name is given, which must mean it.

    The names differ where one is a default: an export of Keras 3 calls its output `output_0`, an
    export of Keras 2 had the layer's name.
    """
    if len(asked) == len(tensors) == 1 and any(
        _UNCHOSEN.fullmatch(name) for name in (asked[0], tensors[0].name)
    ):
        return tensors[0]
    return None


@dataclass(frozen=True)
class Signature:
    """A model's inputs and outputs.

    Attributes:
        outputs: empty if they are only known after a run.
        optional: inputs that may be left out.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    optional: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class ModelSource:
    """A saved model. Two that are equal are the same model.

    Attributes:
        path: a path or URL that the executors can read, or `SPARK_FILE` and a name; empty if
            `content` is the model.
        fingerprint: changes with the model's files.
        signature_def_key: of a SavedModel; None for its only one, or `serving_default`.
        tag_set: of a SavedModel; empty for any.
        content: a model's file, a SavedModel's folder as a ZIP archive, a pickled module, or a
            pickled function that makes the module.
        objects: classes and functions that a `.keras` file names, pickled; empty for none.
        released: names of Spark's files that an executor may delete, as it asks for this one.
    """

    path: str
    format: Format
    fingerprint: str
    signature_def_key: str | None = None
    tag_set: tuple[str, ...] = ()
    # The fingerprint is its digest.
    content: bytes | None = field(default=None, compare=False)
    objects: bytes = b""
    released: tuple[str, ...] = field(default=(), compare=False)

    @property
    def given(self) -> bytes | str:
        """The model's content, or a path that this task or node can read."""
        return self.content or self.on_executor().path

    def on_executor(self) -> ModelSource:
        """Return the source with a path that this task, and processes on its host, can read."""
        if not self.path.startswith(SPARK_FILE):
            return self
        from pyspark import SparkFiles

        for name in self.released:
            Path(SparkFiles.get(name)).unlink(missing_ok=True)
        return replace(self, path=SparkFiles.get(self.path.removeprefix(SPARK_FILE)))


def source_of(
    path: str, signature_def_key: str | None = None, tag_set: str | None = None
) -> ModelSource:
    """Return the source for a model at `path`, a local path or a URL."""
    path = local_path(path)
    kind: Format = "keras" if path.endswith(".keras") else "saved_model"
    return with_keys(ModelSource(path, kind, fingerprint(path)), signature_def_key, tag_set)


def with_keys(
    source: ModelSource, signature_def_key: str | None, tag_set: str | None
) -> ModelSource:
    """Return a source with the signature and the tags that are wanted of a SavedModel."""
    if source.format != "saved_model":
        return source
    tags = tuple(tag.strip() for tag in (tag_set or "").split(",") if tag.strip())
    return replace(source, signature_def_key=signature_def_key, tag_set=tags)


def source_of_content(content: bytes, kind: Format = "keras") -> ModelSource:
    return ModelSource("", kind, hashlib.sha256(content).hexdigest(), content=content)


def local_path(path: str) -> str:
    """Return a `file:` URL as a path, and anything else as it is."""
    parts = urlsplit(path)
    return parts.path if parts.scheme == "file" else path


def fingerprint(path: str) -> str:
    """Return a digest of names, sizes and times of a local model's files; empty for a URL."""
    if urlsplit(path).scheme:
        return ""
    root = Path(path)
    if not root.exists():
        raise ConfigError(
            f"there is no saved model at {path} on this machine. It must be a file or folder that "
            "driver and executors can read: a SavedModel's folder or a .keras file"
        )
    files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
    digest = hashlib.sha256()
    for file in files:
        stat = os.stat(file)
        # Not the content: models have gigabytes, and this is asked at every transform.
        line = f"{file.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}\n"
        digest.update(line.encode())
    return digest.hexdigest()
