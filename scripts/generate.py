"""Writes what is compared with the code by tests, so that a commit shows what it changes for users.

python -m scripts.generate                       the public names with their parameters and
                                                 defaults, the types of `**options`, and the
                                                 state machines in docs/design.md
python -m scripts.generate notebooks/*.ipynb     their outputs, without traces of this machine
"""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from sparkdl.driver.feeds import transitions as feed
from sparkdl.driver.feeds.state import Idle
from sparkdl.driver.lifecycle import transitions as cluster
from sparkdl.driver.lifecycle.state import Gathering
from sparkdl.node import state as node

ROOT = Path(__file__).parent.parent
API = ROOT / "tests" / "public_api.txt"
OPTIONS = ROOT / "sparkdl" / "driver" / "options.py"
DESIGN = ROOT / "docs" / "design.md"
_GIVEN = ("Cluster", "NodeContext")
"""Classes whose objects users are given: their constructors are internal."""
_TIMEOUT_S = 300
_KEPT = re.compile(r"^(feed '|Cluster )")
_OF_MACHINE = re.compile(r"^(Dashboard: |\[\w+:\d+\] (Traceback|  |\w+Error))")


# the public names


def api() -> str:
    """Return a line for each public name, method and argument, in the order of the names.

    A last part has a line for each parameter of Spark ML, with its default and the classes that
    have it.
    """
    from pyspark.ml.param import Param

    import sparkdl
    from sparkdl.ml.params import TABLE

    lines: list[str] = []
    owners: dict[str, list[str]] = {}
    for name in sorted(sparkdl.__all__):
        member = getattr(sparkdl, name)
        lines += _lines(name, member)
        for each, value in _members(member) if inspect.isclass(member) else ():
            if isinstance(value, Param):
                owners.setdefault(each, []).append(name)
    for each, names in sorted(owners.items()):
        lines.append(f"{each}={TABLE[each].default!r}: {', '.join(names)}")
    return "\n".join((*lines, ""))


def _lines(name: str, member: Any) -> Iterator[str]:
    if inspect.ismodule(member):
        yield name
        for each in sorted(vars(member).get("__all__") or _classes(member)):
            yield from _lines(f"{name}.{each}", getattr(member, each))
    elif inspect.isclass(member):
        yield f"{name}({', '.join(each.__name__ for each in member.__bases__)})"
        fields = set(getattr(member, "__dataclass_fields__", ()))
        for each, value in () if issubclass(member, Exception) else _members(member):
            if each == "__init__":
                yield from () if member.__name__ in _GIVEN else _arguments(value)
            # Each parameter has a setter and a getter, and Spark's name of it is an `attrgetter`.
            elif not (each in fields or re.match("[gs]et[A-Z]", each) or _is_param(value)):
                yield from _lines(f"{name}.{each}", value)
    else:
        yield name
        if callable(member) or isinstance(member, (classmethod, staticmethod)):
            yield from _arguments(getattr(member, "__func__", member))


def _members(kind: type) -> list[tuple[str, Any]]:
    own = {
        each: value
        for base in reversed(kind.__mro__)
        if base.__module__.partition(".")[0] == "sparkdl"
        for each, value in vars(base).items()
        if each == "__init__" or not each.startswith("_")
    }
    return sorted(own.items())


def _arguments(function: Any) -> Iterator[str]:
    for each in inspect.signature(function).parameters.values():
        if each.name not in ("self", "cls"):
            yield f"    {_parameter(each)}"


def _is_param(member: Any) -> bool:
    from pyspark.ml.param import Param

    is_alias = isinstance(member, property) and isinstance(member.fget, attrgetter)
    return is_alias or isinstance(member, Param)


def _classes(module: Any) -> Iterator[str]:
    """Return the names of the classes and functions that a module without `__all__` defines."""
    homes = (module.__name__, module.__name__.replace("sparkdl.errors", "sparkdl.core.errors"))
    return (
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") in homes
    )


def _parameter(parameter: inspect.Parameter) -> str:
    text = str(parameter.replace(annotation=parameter.empty))
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return f"*, {text}" if parameter.kind is parameter.KEYWORD_ONLY else text


# the types of `**options`


def with_fields(text: str) -> str:
    """Return the text of the module whose `LaunchOptions` has the keyword arguments of `launch`.

    They are those of a signature, which a type checker cannot follow.
    """
    from sparkdl.driver.launch import launch

    head = re.match(r'.*class LaunchOptions\([^\n]*\n    """[^\n]*"""\n\n', text, re.DOTALL)
    assert head
    rest = re.search(r"\n\nclass .*", text[head.end() :], re.DOTALL)
    named = inspect.signature(launch).parameters.values()
    fields = {each.name: each.annotation for each in named if each.kind is each.KEYWORD_ONLY}
    lines = (f"    {field}: {annotation}\n" for field, annotation in fields.items())
    return head[0] + "".join(lines).replace("'", '"') + (rest[0] if rest else "")


# the state machines: what leads where, from the tables of transitions and the types of the handlers
# in them. One that returns `Step[Running | Failing]` leads to these two; mypy holds them to that.


class Machine(NamedTuple):
    """A state machine.

    Attributes:
        looks: handlers of no event: what is done in a state as soon as it can be.
    """

    first: type
    transitions: Mapping[tuple[type, type], Callable[..., Any]]
    looks: Mapping[type, Callable[..., Any]] = {}


MACHINES = {
    "cluster": Machine(Gathering, cluster.TRANSITIONS),
    "feed": Machine(Idle, feed.TRANSITIONS, feed.LOOKS),
    "node": Machine(node.Ready, node.TRANSITIONS),
}


def next_states(handler: Callable[..., Any], state: type) -> set[type]:
    """Return what may follow `state`, by the handler's type."""
    after, _ = get_args(get_type_hints(handler)["return"])
    return {state if isinstance(each, TypeVar) else each for each in get_args(after) or (after,)}


def edges(machine: Machine) -> dict[tuple[type, type], list[str]]:
    """Return the events that lead from one state to another; none where a look does."""
    found: dict[tuple[type, type], list[str]] = {}
    for state, look in machine.looks.items():
        for after in next_states(look, state) - {state}:
            found.setdefault((state, after), [])
    for (state, event), handler in machine.transitions.items():
        for after in next_states(handler, state) - {state}:
            found.setdefault((state, after), []).append(event.__name__)
    return found


def drawn(machine: Machine) -> str:
    """Return the diagram, in the language of Mermaid."""
    states = [*dict.fromkeys(state for state, _ in machine.transitions)]
    found = edges(machine)
    lines = ["stateDiagram-v2", f"[*] --> {machine.first.__name__}"]
    for state, after in sorted(found, key=lambda edge: [_place(states, each) for each in edge]):
        events = "<br>".join(sorted(found[state, after]))
        lines.append(f"{state.__name__} --> {after.__name__}" + (f": {events}" if events else ""))
    return "\n    ".join(lines)


def _place(states: list[type], state: type) -> int:
    return states.index(state) if state in states else len(states)


def with_diagrams(text: str) -> str:
    """Return a page whose diagrams, between their markers, are those of the machines."""
    for name, machine in MACHINES.items():
        marks = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        pattern = re.escape(marks[0]) + ".*?" + re.escape(marks[1])
        before, *old, after = re.split(pattern, text, flags=re.DOTALL)
        assert not old, f"the page has several places for the diagram of a {name}"
        text = f"{before}{marks[0]}```mermaid\n{drawn(machine)}\n```\n{marks[1]}{after}"
    return text


# notebooks


def save_notebooks(paths: list[str]) -> None:
    """Execute and save each of `paths`."""
    import nbformat
    from nbclient import NotebookClient

    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            client = NotebookClient(
                notebook,
                timeout=_TIMEOUT_S,
                kernel_name="python3",
                record_timing=False,
                coalesce_streams=True,
                resources={"metadata": {"path": folder}},
            )
            client.execute()
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = [kept for output in cell.outputs if (kept := _clean(output))]
        notebook.metadata = {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
        nbformat.write(notebook, path)
        print(f"{path}: {Path(path).stat().st_size // 1000} kB")


def _clean(output: Any) -> Any:
    """Return an output without Spark's log, addresses of dashboards and tracebacks of nodes."""
    if output.output_type != "stream":
        return output
    lines = [line.rpartition("\r")[2] for line in output.text.splitlines(keepends=True)]
    if output.name == "stderr":
        output.text = "".join(line for line in lines if _KEPT.match(line))
    else:
        output.text = "".join(line for line in lines if not _OF_MACHINE.match(line))
    return output if output.text else None


def main(notebooks: list[str]) -> None:
    """Write the files, or save notebooks."""
    if notebooks:
        save_notebooks(notebooks)
        return
    API.write_text(api(), encoding="utf-8")
    for path, changed in ((OPTIONS, with_fields), (DESIGN, with_diagrams)):
        path.write_text(changed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
