"""What every test gets: the leak police, Spark sessions, markers, an order, time limits."""

from __future__ import annotations

import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings

from sparkdl.core import imports
from tests.doubles import sessions
from tests.doubles.leaks import DEADLINE_S, RUN_VARIABLE, Police
from tests.doubles.sessions import SparkSessions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROOT = Path(__file__).parent.parent
_SLOW_TIMEOUT_S = 300
_DEEP_TIMEOUT_S = 1800
_SLOW = ("spark", "tensorflow", "torch", "jax")
_LAST = 100
_MAX_ID_CHARS = 80
_SUMMED_S = 60.0
"""Shorter runs print no seconds by folder."""
_BUDGET_S = {
    **{"ml": 300, "driver": 270, "frameworks": 125, "node": 95, "pairs": 90, "faults": 65},
    **{"tests": 50, "datasets": 45, "feed": 45},
}
"""What the tests of a folder may take on two quiet cores; of any other folder `_OTHER_S`. Together
they take three processes seven minutes."""
_OTHER_S, _OVER = 30, 1.2
_JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Of every JVM of the tests: they live too shortly to win back what optimising them costs."""
_CLASSES = _ROOT / "build" / "spark.jsa"
"""With which they start faster: `make test` writes it, see tests/doubles/classes.py."""

# Machines are slow at times: an example may take as long as its test. What explains a failure
# traces each line, so that the test's time limit would end before it is told.
settings.register_profile(
    "quick",
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=set(Phase) - {Phase.explain},
)
settings.register_profile("deep", settings.get_profile("quick"), max_examples=1000)

_SPARK_FIXTURES = {
    "spark_local": sessions.LOCAL,
    "spark_ml": sessions.ML,
    "spark_standalone": sessions.STANDALONE,
    "spark_cluster": sessions.CLUSTER,  # nodes of tests/driver stay up there, so no other follows
    "spark_session_on": None,  # any master, named by the test
}
_LARGEST = (
    *("spark_local", "spark_ml", "spark_cluster"),
    *("spark_standalone", "001-test_keras_integration.py", "001-tensorflow", "001-torch"),
    "spark_session_on",
)
"""Groups of tests that take longest, see `_group`: no worker may come to one of them last."""


# which tests run, and in what order


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--deep",
        action="store_true",
        help="run the tests marked deep, and those of Hypothesis with 1,000 examples; only these",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Load Hypothesis' profile before test modules are imported, and let Ctrl-C arrive.

    TensorFlow is imported here as in nodes: without leaves of Keras that a test seldom reads from.
    """
    sys.meta_path.insert(0, imports.LaterFinder())
    settings.load_profile("deep" if config.getoption("deep") else "quick")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts what it runs in the background so, and children would inherit it: those
        # that tests interrupt would never notice.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Keep long texts out of the names of tests."""
    if isinstance(val, str | bytes) and len(val) > _MAX_ID_CHARS:
        return f"{len(val)} characters"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose, mark, skip what cannot run here, and keep tests of Spark together."""
    is_deep = config.getoption("deep")
    _choose(config, items, is_deep=is_deep)
    missing = _missing()
    for item in items:
        if _spark_fixture(item) is not None:
            item.add_marker("spark")
        names = {mark.name for mark in item.iter_markers()}
        if "timeout" not in names and is_deep:
            item.add_marker(pytest.mark.timeout(_DEEP_TIMEOUT_S))
        elif "timeout" not in names and not names.isdisjoint(_SLOW):
            item.add_marker(pytest.mark.timeout(_SLOW_TIMEOUT_S))
        for name in names & missing.keys():
            item.add_marker(pytest.mark.skip(reason=missing[name]))
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=_turn)
    if "PYTEST_XDIST_WORKER" in os.environ:  # the largest groups first, while others do the rest
        items.sort(key=_size)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse a pytest with which pytest-xdist loses groups: each worker would start all JVMs."""
    wants_groups = getattr(session.config.option, "loadgroup", False)
    if wants_groups and session.items and "@" not in session.items[0].nodeid:
        raise pytest.UsageError(
            f"pytest {pytest.__version__} and this pytest-xdist do not keep a group on one "
            "worker; install the versions of constraints.txt"
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seconds that the tests of each folder took, and which took more than they may."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folder = "/".join(report.nodeid.split("::")[0].split("/")[1:-1])
                seconds[folder.split("/")[0] or "tests"] += report.duration
    if (total := sum(seconds.values())) >= _SUMMED_S:
        terminalreporter.section("seconds by folder")
        largest = sorted(seconds.items(), key=lambda item: -item[1])
        found = ", ".join(f"{name} {took:.0f}" for name, took in largest)
        terminalreporter.write_line(f"{total:.0f}: {found}")
        budgets = {name: _BUDGET_S.get(name, _OTHER_S) for name in seconds}
        for name, took in largest:
            if took > _OVER * budgets[name] and not terminalreporter.config.getoption("deep"):
                said = f"{name} takes {took:.0f} s of its {budgets[name]}, if the machine is quiet"
                terminalreporter.write_line(said, yellow=True)


def _choose(config: pytest.Config, items: list[pytest.Item], *, is_deep: bool) -> None:
    """Keep the tests that are not marked deep, or those that are and those of Hypothesis."""
    chosen: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        is_marked = any(item.get_closest_marker(name) for name in ("deep", "smoke"))
        has_examples = is_hypothesis_test(getattr(item, "obj", None))
        is_chosen = is_marked or has_examples if is_deep else not is_marked
        (chosen if is_chosen else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = chosen


def _group(item: pytest.Item) -> str:
    """Return which tests run on the same worker of pytest-xdist, which takes a group as a whole.

    They are a file's tests of one turn; or those that share a Spark session, since each worker that
    had some of these would start JVMs of its own; or those that import TensorFlow or PyTorch here.
    """
    name = item.path.name
    if "integration" not in name:
        name = next((m for m in ("tensorflow", "torch") if item.get_closest_marker(m)), name)
    return _spark_fixture(item) or f"{_turn(item):03}-{name}"


def _size(item: pytest.Item) -> int:
    """Return the place of the item's group in the order from the largest to the smallest."""
    group = _group(item)
    if group in _LARGEST:
        return _LARGEST.index(group)
    turn = _turn(item)
    return sys.maxsize if turn == _LAST else len(_LARGEST) + 1 - turn  # slow frameworks come sooner


def _turn(item: pytest.Item) -> int:
    fixture = _spark_fixture(item)
    if fixture is not None:
        return 2 + list(_SPARK_FIXTURES).index(fixture)
    if item.get_closest_marker("jax"):
        return _LAST  # JAX starts threads in this process, and Spark's launch forks it
    slow = any(item.get_closest_marker(name) for name in _SLOW)
    return 1 if slow else 0


def _spark_fixture(item: pytest.Item) -> str | None:
    wanted = getattr(item, "fixturenames", ())
    return next((name for name in _SPARK_FIXTURES if name in wanted), None)


def _missing() -> dict[str, str]:
    """Return, by marker, why its tests cannot run here."""
    there = {
        "spark": sessions.is_java_there(),
        "tensorflow": find_spec("tensorflow") is not None,
        "torch": find_spec("torch") is not None,
        "jax": find_spec("jax") is not None,
        "gpu": Path("/dev/nvidiactl").exists() and _has_gpu(),
    }
    words = {"spark": "no Java (JAVA_HOME, PATH)", "gpu": "no NVIDIA GPU"}
    return {
        marker: words.get(marker, f"{marker} is not installed")
        for marker, is_there in there.items()
        if not is_there
    }


def _has_gpu() -> bool:
    """Whether NVML lists a GPU. It keeps pipes in this process from here on, which no test left."""
    from sparkdl.core.errors import FrameworkMissingError
    from sparkdl.node.gpus import list_gpus, open_nvml

    with suppress(FrameworkMissingError), open_nvml() as nvml:
        return bool(list_gpus(nvml))
    return False


# the run: a folder and an environment of its own


def _java_options() -> str:
    if not _CLASSES.exists() or " " in str(_CLASSES):  # which separates options
        return _JAVA_OPTIONS
    return f"{_JAVA_OPTIONS} -XX:SharedArchiveFile={_CLASSES} -Xlog:cds*=off"


@pytest.fixture(scope="session")
def run_name(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Set this run's environment: its mark, a temporary folder, `tests` importable by children."""
    tmp_path_factory.getbasetemp()  # which stays where it is, for a look after a failure
    multiprocessing.util.get_temp_dir()  # outside of the folder, since it is removed later
    name = uuid.uuid4().hex
    folder = tempfile.mkdtemp(prefix="sdl-")  # short, for paths of Unix sockets
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_VARIABLE, name)
        patch.setenv("TMPDIR", folder)
        patch.setenv("JAVA_TOOL_OPTIONS", _java_options())
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # tests marked gpu unset it
        # numpy starts no threads: in a thousand processes they would take a tenth of the time.
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        patch.setenv("SPARKDL_DASHBOARD", "0")  # tests of it ask for it
        patch.setattr(tempfile, "tempdir", folder)
        path = os.environ.get("PYTHONPATH")
        patch.setenv("PYTHONPATH", f"{_ROOT}{os.pathsep}{path}" if path else str(_ROOT))
        yield name
    shutil.rmtree(folder, ignore_errors=True)


# the leak police


@pytest.fixture(scope="session", autouse=True)
def _nothing_outlives_the_run(run_name: str) -> Iterator[None]:
    yield from _watch(Police(run_name, deadline_s=3 * DEADLINE_S))


@pytest.fixture(autouse=True)
def _nothing_outlives_its_test(
    request: pytest.FixtureRequest, run_name: str, spark_sessions: SparkSessions
) -> Iterator[None]:
    if _spark_fixture(request.node) is None:
        spark_sessions.close()  # its JVMs would take memory and time beside this test's processes
    for name in _SPARK_FIXTURES.keys() & set(request.fixturenames):
        if _SPARK_FIXTURES[name]:  # before the police looks: the session belongs to many tests
            request.getfixturevalue(name)
    has_spark = spark_sessions.is_active or "spark_session_on" in request.fixturenames
    yield from _watch(Police(run_name, has_spark))


def _watch(police: Police) -> Iterator[None]:
    yield
    leaks = police.leaks()
    if leaks:
        police.clean_up()
        pytest.fail("left behind:\n  " + "\n  ".join(leaks), pytrace=False)


# Spark


@pytest.fixture(scope="session")
def spark_sessions(run_name: str, _nothing_outlives_the_run: None) -> Iterator[SparkSessions]:
    """The owner of the Spark session; costs nothing until one is wanted."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SPARK_HOME", "SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR"):
            patch.delenv(name, raising=False)
        before = dict(os.environ)
        spark = SparkSessions(Path(tempfile.mkdtemp(prefix="spark-")))
        yield spark
        spark.close()
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@pytest.fixture
def spark_session_on(spark_sessions: SparkSessions) -> Iterator[Callable[[str], SparkSession]]:
    """A function that returns a session on the master it is given, for this test alone."""
    yield spark_sessions.get
    spark_sessions.close()  # the JVM too, which this test may have started


def _session_of(master: str) -> Any:
    @pytest.fixture
    def session(spark_sessions: SparkSessions) -> SparkSession:
        return spark_sessions.get(master)

    return session


spark_local = _session_of(sessions.LOCAL)
"""A session on `local[4]`."""
spark_ml = _session_of(sessions.ML)
"""A session on `local[4]` whose Python workers are born with TensorFlow and PyTorch."""
spark_cluster = _session_of(sessions.CLUSTER)
"""A session on two executors of two slots."""
spark_standalone = _session_of(sessions.STANDALONE)
"""A session on a standalone cluster: a master and two workers of three cores each."""
