"""Writes the fields of the type of `**options`: `python -m scripts.options`.

They are those of a signature, which a type checker cannot follow.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from sparkdl.driver import options
from sparkdl.driver.launch import launch

PATH = Path(options.__file__)


def with_fields(text: str) -> str:
    """Return the text of the module whose `LaunchOptions` has the keyword arguments of `launch`."""
    head = re.match(r'.*class LaunchOptions\([^\n]*\n    """[^\n]*"""\n\n', text, re.DOTALL)
    assert head
    rest = re.search(r"\n\nclass .*", text[head.end() :], re.DOTALL)
    named = inspect.signature(launch).parameters.values()
    fields = {each.name: each.annotation for each in named if each.kind is each.KEYWORD_ONLY}
    lines = (f"    {field}: {annotation}\n" for field, annotation in fields.items())
    return head[0] + "".join(lines).replace("'", '"') + (rest[0] if rest else "")


if __name__ == "__main__":
    PATH.write_text(with_fields(PATH.read_text(encoding="utf-8")), encoding="utf-8")
