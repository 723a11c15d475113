"""Writes the fields of the types of `**options`: `python -m scripts.options`.

They are those of a signature and of a table, which a type checker cannot follow.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sparkdl.driver import options
from sparkdl.driver.launch import launch
from sparkdl.ml.estimators import options as params
from sparkdl.ml.estimators.keras_estimator import KerasEstimator
from sparkdl.ml.estimators.torch_estimator import LightningEstimator, TorchEstimator
from sparkdl.ml.params import TABLE, Row

_READ = {"List[str]": "Sequence[str]", "dict[Any, Any]": "Mapping[str, Any]"}
"""What a converter returns, as what it takes."""


def launch_fields() -> dict[str, str]:
    """Return the keyword arguments of `launch` with their annotations."""
    named = inspect.signature(launch).parameters.values()
    return {each.name: each.annotation for each in named if each.kind is each.KEYWORD_ONLY}


def params_of(kind: Any) -> dict[str, str]:
    """Return the parameters of an estimator with what their converters take."""
    return {each.name: _taken(TABLE[each.name]) for each in kind().params}


def _taken(row: Row) -> str:
    if kind := inspect.getclosurevars(row.convert).nonlocals.get("kind"):
        taken = kind.__name__
    elif words := inspect.getclosurevars(row.convert).nonlocals.get("words"):
        taken = f"Literal[{', '.join(map(repr, words))}]"
    else:
        returned = inspect.signature(row.convert).return_annotation
        text = returned if isinstance(returned, str) else inspect.formatannotation(returned)
        taken = _READ.get(text.replace("typing.", ""), text)
    return f"{taken} | None" if row.default is None and taken != "Any" else taken


def common() -> dict[str, str]:
    """Return the parameters that all estimators of networks have."""
    keras, *others = (set(params_of(kind).items()) for kind in _ESTIMATORS.values())
    return dict(sorted(keras.intersection(*others)))


def own(kind: Any) -> dict[str, str]:
    """Return an estimator's other parameters."""
    return dict(sorted(params_of(kind).items() - common().items()))


_ESTIMATORS = {
    "KerasParams": KerasEstimator,
    "LightningParams": LightningEstimator,
    "TorchParams": TorchEstimator,
}
WRITTEN: tuple[tuple[Path, str, Callable[[], dict[str, str]]], ...] = (
    (Path(options.__file__), "LaunchOptions", launch_fields),
    (Path(params.__file__), "NetworkParams", common),
    *((Path(params.__file__), name, partial(own, kind)) for name, kind in _ESTIMATORS.items()),
)


def with_fields(text: str, name: str, fields: Mapping[str, str]) -> str:
    """Return the text of a module whose class `name` has these fields."""
    head = re.match(rf'.*class {name}\([^\n]*\n    """[^\n]*"""\n\n', text, re.DOTALL)
    assert head, name
    rest = re.search(r"\n\nclass .*", text[head.end() :], re.DOTALL)
    lines = (f"    {field}: {annotation}\n" for field, annotation in fields.items())
    return head[0] + "".join(lines).replace("'", '"') + (rest[0] if rest else "")


if __name__ == "__main__":
    for path, name, fields in WRITTEN:
        path.write_text(with_fields(path.read_text(encoding="utf-8"), name, fields()), "utf-8")
