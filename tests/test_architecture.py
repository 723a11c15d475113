"""The house rules: who may import whom, what runs where, how large things may grow.

The rules are functions from a tree of modules to complaints. sparkdl is held to them, and small
made-up trees prove that each of them bites.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

import pytest

from tests.doubles.programs import output_of

ROOT = Path(__file__).parent.parent

LAYERS = {  # a module may import its own package, and packages of a lower number
    name: number
    for number, name in enumerate(
        (
            *("version", "core", "errors", "spark_versions", "values", "control", "storage"),
            *("feed", "datasets", "collectives", "frameworks", "data"),
            *("node", "driver"),
            "lightning",  # a face that an estimator of ml trains with
            "ml",
            # The faces. Each is a door for somebody: nothing inside knows them.
            *("torch_program", "distributors", "transformers", "keras", "petastorm"),
            *("diagnosis", "dashboard", "mlflow"),
            *("tfos", "horovod"),
            "",  # sparkdl/__init__.py
            *("demo", "cli", "__main__"),
        )
    )
}


TANGLED = {  # packages whose folders know each other, and why
    "driver": "the controller asks the history of feeds, and feeds ask the controller",
    "ml": "KerasEstimator trains as jobs, too, with the batches and callbacks of a node",
    "horovod": "horovod.tensorflow.keras is a second name for horovod.keras, as in Horovod",
}

PYSPARK = {  # who may import pyspark
    "spark_versions.py": "knows what differs between the versions of pyspark",
    "driver/executors/spark.py": "performs what the driver decides on Spark",
    "driver/executors/sessions.py": "tells classic sessions from those of Spark Connect",
    "driver/executors/result_rdd.py": "derives from Spark's RDD",
    "driver/executors/parquet_scan.py": "reads a DataFrame's plan, types and files",
    "driver/executors/scored.py": "names and types the columns of results",
    "driver/slots/placement.py": "asks Spark for a node's GPUs; lazily",
    "*task.py": "runs inside a Spark task",
    "feed/transfer/feeder.py": "runs inside a Spark task",
    "node/resources.py": "asks the task for its GPUs",
    "values/rows.py": "gives pyspark's own Row back to who fed it; lazily",
    "ml/*": "Spark ML",
    "data/*": "a Spark data source",
    "tfos/*": "a face",
    "horovod/*": "a face",
    "cli.py": "a face",
    "demo.py": "starts the session that it trains in",
    "mlflow/*": "a face",
    "petastorm/*": "a face",
    "diagnosis/doctor.py": "starts the session that it examines",
    "distributors.py": "a face",
}
PYSPARK_LAZILY = (
    *("feed/*", "values/*", "cli.py", "demo.py", "node/resources.py", "*task.py"),
    *("distributors.py", "petastorm/*", "diagnosis/doctor.py"),
)
"""Of these, those that import it inside functions only: they load where there may be no pyspark."""

FRAMEWORKS = ("tensorflow", "keras", "tf_keras", "torch", "jax")
FRAMEWORK_USERS = {  # who may import a framework: inside functions, for the driver has none
    "frameworks/*": "one file a framework",
    "datasets/tensorflow.py": "batches become tensors",
    "datasets/torch.py": "batches become tensors; nodes exchange rows by torch.distributed",
    "datasets/hugging_face.py": "nodes agree on steps by torch.distributed",
    "datasets/jax.py": "batches become arrays on devices, and what Keras on JAX takes",
    "values/ndarrays.py": "batches become tensors",
    "collectives/*": "reduces a framework's tensors",
    "demo.py": "trains a module of PyTorch",
    "diagnosis/doctor.py": "reduces a tensor between nodes",
    "ml/scoring/tensorflow.py": "loads a saved model",
    "ml/scoring/engines.py": "generates text with a model of PyTorch",
    "ml/scoring/torch.py": "loads a saved model, and takes a module",
    "ml/daemon.py": "imports TensorFlow for Spark's workers",
    "ml/estimators/keras_train.py": "trains a Keras model",
    "ml/estimators/torch_batch.py": "losses and metrics of PyTorch",
    "ml/estimators/torch_train.py": "trains a module of PyTorch",
    "ml/estimators/text_make.py": "an optimizer of PyTorch",
    "ml/scoring/text.py": "a module of PyTorch that takes text",
    "ml/scoring/keras_*.py": "saves and loads a Keras model",
    "ml/jobs/keras.py": "a Keras model in Spark jobs",
    "tfos/*": "TensorFlowOnSpark's signatures name TensorFlow's types",
    "horovod/*": "Horovod's signatures name the frameworks' types",
    "petastorm/*": "a converter gives datasets of both",
    "lightning.py": "a data module gives loaders of PyTorch",
}

MAX_LINES = 900

CEILINGS = {  # lines of each folder: lowered by each commit that takes something out, never raised
    "": 1_355,
    "collectives": 876,
    "control": 2_236,
    "core": 2_023,
    "dashboard": 982,
    "data": 844,
    "datasets": 1_817,
    "diagnosis": 1_069,
    "driver": 9_295,
    "feed": 5_638,
    "frameworks": 1_296,
    "horovod": 5_478,
    "ml": 9_040,
    "mlflow": 352,
    "node": 5_346,
    "petastorm": 510,
    "storage": 1_075,
    "tfos": 1_468,
    "values": 1_884,
}

FORBIDDEN = {  # calls, and what to write instead; ruff knows others (pyproject.toml)
    "cloudpickle.load": "decode with msgspec; user code crosses only in Spark's own task payload",
    "cloudpickle.loads": "decode with msgspec; user code crosses only in Spark's own task payload",
}
FORBIDDEN_BUT = {
    ("node/child.py", "cloudpickle.loads"): "the user's function, from the Spark task's payload",
    ("torch_program.py", "cloudpickle.loads"): "what the user's function returned",
    ("ml/persistence.py", "cloudpickle.loads"): "the user's function, from where it was saved",
    ("ml/scoring/describe.py", "cloudpickle.load"): "the user's function, from its own driver",
    ("ml/scoring/describe.py", "cloudpickle.loads"): "the answer of a process of one's own",
    (
        "ml/scoring/predictor.py",
        "cloudpickle.loads",
    ): "the user's function, from the Spark task's payload",
    ("ml/estimators/keras_train.py", "cloudpickle.loads"): "the fit's own, from its checkpoint",
    ("collectives/group.py", "cloudpickle.loads"): "sealed with the group's secret",
    ("horovod/common/elastic.py", "cloudpickle.loads"): "the user's state, from its checkpoint",
}

PLACES = {"driver", "agent", "child", "feeder", "dashboard", "fork server", "anywhere"}


@dataclass(frozen=True)
class Import:
    """One import of one module, wherever in a file."""

    target: str
    line: int
    is_lazy: bool
    is_for_types: bool


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    path: Path
    root: Path

    @cached_property
    def where(self) -> str:
        """The path within the package, like `core/world.py`."""
        return self.path.relative_to(self.root).as_posix()

    @cached_property
    def name(self) -> str:
        parts = [self.root.name, *self.path.relative_to(self.root).with_suffix("").parts]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def package(self) -> str:
        """The first name below the root, which decides the layer; empty for the root itself."""
        return [*self.name.split("."), ""][1]

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(self._imports(self.tree, is_lazy=False, is_for_types=False))

    def _imports(self, node: ast.AST, is_lazy: bool, is_for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, is_lazy, is_for_types)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                target = f"{self._source(node)}.{alias.name}"
                yield Import(target, node.lineno, is_lazy, is_for_types)
        elif isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            for statement in node.body:
                yield from self._imports(statement, is_lazy, is_for_types=True)
            for statement in node.orelse:
                yield from self._imports(statement, is_lazy, is_for_types)
        else:
            is_lazy = is_lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for child in ast.iter_child_nodes(node):
                yield from self._imports(child, is_lazy, is_for_types)

    def _source(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
        parts = package.split(".")[: len(package.split(".")) - node.level + 1]
        return ".".join([*parts, *([node.module] if node.module else [])])


def modules_of(root: Path) -> list[Module]:
    return [Module(path, root) for path in sorted(root.rglob("*.py"))]


def within(where: str, patterns: object) -> bool:
    return any(fnmatch(where, str(pattern)) for pattern in patterns)  # type: ignore[attr-defined]


# The rules


def dependencies_point_one_way(modules: list[Module]) -> Iterator[str]:
    root = modules[0].root.name
    for module in modules:
        if module.package not in LAYERS:
            yield f"{module.where}: {module.package} has no layer yet; give it one in LAYERS"
            continue
        own = LAYERS[module.package]
        for imported in module.imports:
            top, _, rest = imported.target.partition(".")
            package = rest.split(".")[0]
            if top != root or package == module.package:
                continue
            layer = LAYERS.get(package, LAYERS[""])
            if layer >= own:
                yield (
                    f"{module.where}:{imported.line} imports {imported.target}: layer {own} may"
                    f" not know layer {layer}. Move what both need down, or pass it in."
                )


def imports_make_no_circles(modules: list[Module]) -> Iterator[str]:
    for circle in _all_circles(modules, lambda name: name):
        yield f"{circle}: a circle of imports. Move what they share to a third module."


def folders_make_no_circles(modules: list[Module]) -> Iterator[str]:
    """A folder of a package, and a file beside its folders, is one thing: it is known or knows."""

    def place_of(name: str) -> str:
        parts = name.split(".")
        return name if {*parts[1:2]} & {*TANGLED} else ".".join(parts[:3])

    for circle in _all_circles(modules, place_of):
        yield f"{circle}: a circle of folders. Move what they share to a third one, or to a file."


def _all_circles(modules: list[Module], place_of: Callable[[str], str]) -> list[str]:
    """Return the circles of imports between the places of modules."""
    names = {module.name for module in modules}
    edges: dict[str, set[str]] = {}
    for module in modules:
        targets = (_longest_module(imported.target, names) for imported in module.imports)
        places = {place_of(target) for target in targets if target}
        edges.setdefault(place_of(module.name), set()).update(places - {place_of(module.name)})
    found = [circle for name in sorted(edges, reverse=True) for circle in _circles(name, edges)]
    return [" -> ".join(circle) for circle in {frozenset(each): each for each in found}.values()]


def _longest_module(target: str, names: set[str]) -> str | None:
    while target and target not in names:
        target = target.rpartition(".")[0]
    return target or None


def _circles(start: str, edges: dict[str, set[str]]) -> Iterator[list[str]]:
    """Yield one shortest path from `start` back to it, if there is one."""
    paths, seen = [[start]], {start}
    while paths:
        path = paths.pop(0)
        for target in sorted(edges[path[-1]]):
            if target == start:
                yield [*path, start]
                return
            if target not in seen:
                seen.add(target)
                paths.append([*path, target])


def pyspark_stays_in_its_rooms(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for imported in module.imports:
            if imported.target.split(".")[0] not in ("pyspark", "py4j") or imported.is_for_types:
                continue
            if not within(module.where, PYSPARK):
                yield (
                    f"{module.where}:{imported.line} imports pyspark, which only"
                    f" {', '.join(PYSPARK)} may. Pass in what it needs from Spark."
                )
            elif within(module.where, PYSPARK_LAZILY) and not imported.is_lazy:
                yield f"{module.where}:{imported.line}: import pyspark inside the function"


def frameworks_are_imported_late(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for imported in module.imports:
            framework = imported.target.split(".")[0]
            if framework not in FRAMEWORKS or imported.is_for_types:
                continue
            if not within(module.where, FRAMEWORK_USERS):
                yield (
                    f"{module.where}:{imported.line} imports {framework}, which only"
                    f" {', '.join(FRAMEWORK_USERS)} may"
                )
            elif not imported.is_lazy:
                yield f"{module.where}:{imported.line}: import {framework} inside the function"


def core_needs_the_standard_library_only(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for imported in module.imports if module.package == "core" else ():
            top = imported.target.split(".")[0]
            if top not in sys.stdlib_module_names and top != module.root.name:
                yield f"{module.where}:{imported.line} imports {top}; core needs nothing installed"


def docstrings_say_where_a_module_runs(modules: list[Module]) -> Iterator[str]:
    """The docstring of a folder says it, and that of a module where it differs."""
    said = {module.name: _runs_in(module) for module in modules}
    for module in modules:
        places, name = said[module.name], module.name
        while not places and name.count(".") > 1:
            name = name.rpartition(".")[0]
            places = said.get(name, set())
        if not places or not places <= PLACES:
            yield (
                f"{module.where}: its docstring, or its folder's, needs a line `Runs in: ...` with"
                f" one or more of {', '.join(sorted(PLACES))}"
            )


def _runs_in(module: Module) -> set[str]:
    lines = (ast.get_docstring(module.tree) or "").splitlines()
    said = [line.removeprefix("Runs in:") for line in lines if line.startswith("Runs in:")]
    return {word.strip(" .") for text in said for word in text.split(".")[0].split(",")}


def files_are_short(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        lines = len(module.text.splitlines())
        if lines > MAX_LINES:
            yield f"{module.where} has {lines} lines, {MAX_LINES} are allowed: split it."


def folders_stay_below_their_ceilings(modules: list[Module]) -> Iterator[str]:
    sizes: Counter[str] = Counter()
    for module in modules:
        folder, slash, _ = module.where.partition("/")
        sizes[folder if slash else ""] += len(module.text.splitlines())
    for folder, lines in sizes.items():
        if lines > CEILINGS.get(folder, 0):
            yield (
                f"{folder or 'the top level'} has {lines} lines, and its ceiling is"
                f" {CEILINGS.get(folder, 0)}. Take something out of it"
            )


def forbidden_calls_are_not_made(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for node in ast.walk(module.tree):
            for name in _calls(node):
                is_allowed = any(
                    fnmatch(module.where, where) and call == name for where, call in FORBIDDEN_BUT
                )
                if name in FORBIDDEN and not is_allowed:
                    line = getattr(node, "lineno", 0)
                    yield f"{module.where}:{line} uses {name}; {FORBIDDEN[name]}"


def _calls(node: ast.AST) -> list[str]:
    """Return the dotted names that `node` uses: `module.name`, imported or written out."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return [f"{node.value.id}.{node.attr}"]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return [node.func.id]
    return []


Rule = Callable[[list[Module]], Iterator[str]]
RULES: tuple[Rule, ...] = (
    dependencies_point_one_way,
    imports_make_no_circles,
    folders_make_no_circles,
    pyspark_stays_in_its_rooms,
    frameworks_are_imported_late,
    core_needs_the_standard_library_only,
    docstrings_say_where_a_module_runs,
    files_are_short,
    folders_stay_below_their_ceilings,
    forbidden_calls_are_not_made,
)


# sparkdl keeps them


@pytest.fixture(scope="module")
def sparkdl() -> list[Module]:
    return modules_of(ROOT / "sparkdl")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_sparkdl_keeps_the_rule(rule: Rule, sparkdl: list[Module]) -> None:
    complaints = list(rule(sparkdl))
    assert not complaints, "\n" + "\n".join(complaints)


def test_tables_name_no_file_that_is_gone(sparkdl: list[Module]) -> None:
    there = [module.where for module in sparkdl]
    folders = {where.partition("/")[0] if "/" in where else "" for where in there}
    assert not CEILINGS.keys() - folders, "a folder that is gone has a ceiling"


def loaded_by(*names: str) -> set[str]:
    """Return the top-level modules that a fresh Python has loaded after importing `names`."""
    code = f"import sys, {', '.join(names)}; print(*{{m.split('.')[0] for m in sys.modules}})"
    return set(output_of(sys.executable, "-c", code, cwd=ROOT).split())


def test_importing_sparkdl_loads_neither_framework_nor_spark() -> None:
    heavy = {*FRAMEWORKS, "pyspark", "py4j", "pyarrow", "pandas", "numpy", "sklearn"}
    assert not loaded_by("sparkdl") & heavy


def test_what_nodes_of_estimators_import_loads_neither_framework_nor_spark_ml() -> None:
    home = "sparkdl.ml.estimators"  # pyspark.ml imports pandas, and takes a second with it
    found = loaded_by(f"{home}.keras_train", f"{home}.torch_train")
    assert not found & {*FRAMEWORKS, "pandas"}


# Each rule bites


def house(folder: Path, **files: str) -> list[Module]:
    """Build a package `house`; `core__world="..."` is its file core/world.py."""
    root = folder / "house"
    for name, text in files.items():
        path = root / (name.replace("__", "/") + ".py" if name != "root" else "__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return modules_of(root)


BAD: tuple[tuple[Rule, dict[str, str], str], ...] = (
    (dependencies_point_one_way, {"core__a": "from house.node import b"}, "core/a.py:1 imports"),
    (dependencies_point_one_way, {"core__a": "from ..node.b import c"}, "house.node.b.c"),
    (dependencies_point_one_way, {"core__a": "def f():\n  import house.node"}, "layer 1 may not"),
    (dependencies_point_one_way, {"node__a": "import house"}, "may not know"),
    (dependencies_point_one_way, {"novel__a": ""}, "novel has no layer yet"),
    (
        imports_make_no_circles,
        {"feed__a": "from house.feed import b", "feed__b": "def f():\n  import house.feed.a"},
        "house.feed.a -> house.feed.b -> house.feed.a",
    ),
    (
        imports_make_no_circles,
        {
            "feed__a": "if TYPE_CHECKING:\n  from house.feed import b",
            "feed__b": "from house.feed.a import x",
        },
        "house.feed.a -> house.feed.b -> house.feed.a",
    ),
    (
        folders_make_no_circles,
        {
            "feed__store__a": "import house.feed.transfer.a",
            "feed__transfer__a": "",
            "feed__transfer__b": "def f():\n  import house.feed.store.a",
        },
        "house.feed.store -> house.feed.transfer -> house.feed.store",
    ),
    (pyspark_stays_in_its_rooms, {"driver__launch": "import pyspark.sql"}, "driver/launch.py:1"),
    (pyspark_stays_in_its_rooms, {"values__rows": "from pyspark import x"}, "inside the function"),
    (frameworks_are_imported_late, {"node__a": "def f():\n  import torch"}, "imports torch, which"),
    (frameworks_are_imported_late, {"frameworks__a": "import keras"}, "inside the function"),
    (core_needs_the_standard_library_only, {"core__a": "import numpy as np"}, "imports numpy"),
    (docstrings_say_where_a_module_runs, {"core__a": '"""It is."""'}, "needs a line `Runs in:"),
    (docstrings_say_where_a_module_runs, {"a": '"""It.\n\nRuns in: hell\n"""'}, "needs a line"),
    (files_are_short, {"core__a": "a = 1\n" * 901}, "901 lines, 900 are allowed"),
    (
        folders_stay_below_their_ceilings,
        {"mlflow__a": "a = 1\n" * 800, "mlflow__b": "b = 1\n" * 800, "core__c": "c = 1\n"},
        "mlflow has 1600 lines, and its ceiling is",
    ),
    (forbidden_calls_are_not_made, {"a": "import cloudpickle\ncloudpickle.loads(b'')"}, "a.py:2 u"),
    (forbidden_calls_are_not_made, {"a": "from cloudpickle import load"}, "uses cloudpickle.load"),
)


@pytest.mark.parametrize(("rule", "files", "complaint"), BAD)
def test_rule_bites(rule: Rule, files: dict[str, str], complaint: str, tmp_path: Path) -> None:
    complaints = list(rule(house(tmp_path, **files)))
    assert len(complaints) == 1, complaints
    assert complaint in complaints[0]
