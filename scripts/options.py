"""Writes the fields of the types of `**options`: `python -m scripts.options`.

They are those of a signature and of a table, which a type checker cannot follow.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparkdl.driver import options
from sparkdl.driver.launch import launch
from sparkdl.ml.estimators import options as params
from sparkdl.ml.estimators.keras_estimator import KerasEstimator
from sparkdl.ml.estimators.params import TABLE, Row
from sparkdl.ml.estimators.torch_estimator import LightningEstimator, TorchEstimator

_READ = {"List[str]": "Sequence[str]", "dict[Any, Any]": "Mapping[str, Any]"}
"""What a converter returns, as what it takes."""


def launch_fields() -> dict[str, str]:
    """Return the keyword arguments of `launch` with their annotations."""
    named = inspect.signature(launch).parameters.values()
    return {each.name: each.annotation for each in named if each.kind is each.KEYWORD_ONLY}


def params_of(kind: Any) -> Callable[[], dict[str, str]]:
    """Return what returns the parameters of an estimator with what their converters take."""
    return lambda: {each.name: _taken(TABLE[each.name]) for each in kind().params}


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


WRITTEN = (
    (Path(options.__file__), "LaunchOptions", launch_fields),
    (Path(params.__file__), "KerasParams", params_of(KerasEstimator)),
    (Path(params.__file__), "LightningParams", params_of(LightningEstimator)),
    (Path(params.__file__), "TorchParams", params_of(TorchEstimator)),
)


def with_fields(text: str, name: str, fields: Mapping[str, str]) -> str:
    """Return the text of a module whose class `name` has these fields."""
    head = re.match(rf'.*class {name}\(TypedDict.*?\n    """[^\n]*"""\n\n', text, re.DOTALL)
    assert head, name
    rest = re.search(r"\n\nclass .*", text[head.end() :], re.DOTALL)
    lines = (f"    {field}: {annotation}\n" for field, annotation in fields.items())
    return head[0] + "".join(lines).replace("'", '"') + (rest[0] if rest else "")


if __name__ == "__main__":
    for path, name, fields in WRITTEN:
        path.write_text(with_fields(path.read_text(encoding="utf-8"), name, fields()), "utf-8")
