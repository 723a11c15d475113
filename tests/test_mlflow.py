"""Trainings as runs of MLflow: a database, read by its own client; and a server that is none."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import sparkdl
import sparkdl.mlflow
from sparkdl.core.errors import NodeFailedError
from sparkdl.core.options import Feeding
from sparkdl.driver.options import Observe
from sparkdl.mlflow import tracker
from sparkdl.node.context import NodeContext
from tests.doubles import nodes
from tests.doubles.nodes import SOON_S

if find_spec("mlflow") is None:
    pytest.skip("MLflow is not installed", allow_module_level=True)
# Importing it takes seconds, which each worker would spend on collecting: functions do.

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader"),  # MLflow's use of SQLAlchemy
]
Choose = Callable[[str, str], None]


def launch(map_fun: Any, args: Any = None, **options: Any) -> sparkdl.Cluster:
    return nodes.launch(map_fun, args, **{"observe": Observe(dashboard=False), **options})


@dataclass(frozen=True)
class Found:
    run_id: str
    status: str
    params: dict[str, str]
    metrics: dict[str, float]
    tags: dict[str, str]
    artifacts: str


@dataclass(frozen=True)
class Store:
    """A database, read by MLflow's own client."""

    uri: str

    def runs(self, experiment: str) -> dict[str, Found]:
        import mlflow

        client = mlflow.MlflowClient(self.uri)
        ids = [client.get_experiment_by_name(experiment).experiment_id]
        return {
            run.info.run_name: Found(
                *(run.info.run_id, run.info.status, run.data.params, run.data.metrics),
                *(run.data.tags, run.info.artifact_uri),
            )
            for run in client.search_runs(ids)
        }

    def history(self, run: Found, metric: str) -> dict[int, float]:
        import mlflow

        found = mlflow.MlflowClient(self.uri).get_metric_history(run.run_id, metric)
        return {each.step: each.value for each in found}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/runs.db")


@pytest.fixture
def tracked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Track by MLflow, wherever the test says, and do not try long."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("_MLFLOW_TELEMETRY_SESSION_ID", raising=False)
    sparkdl.mlflow.autolog()
    yield
    monkeypatch.setattr(tracker, "END_S", 0.1)
    sparkdl.mlflow.autolog(disable=True)
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from mlflow.utils.request_utils import _cached_get_request_session

    _cached_get_request_session.cache_clear()  # with its connections
    for engine in SqlAlchemyStore._engine_map.values():
        engine.dispose()


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Choose:
    """Return what chooses where the next runs are: a tracking URI, an experiment."""

    def choose(uri: str, experiment: str) -> None:
        assert sparkdl.mlflow.flush(SOON_S)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        monkeypatch.chdir(tmp_path)  # artifacts of a database without a server are beside it
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", experiment)

    return choose


def falling(args: float, ctx: NodeContext) -> float:
    for step in range(3):
        if step:  # of reports in quick succession only the last one is sent
            threading.Event().wait(1.0)
        ctx.report(step, loss=args + ctx.rank - step)
        ctx.barrier()
    return args


@pytest.mark.smoke
@pytest.mark.usefixtures("tracked")
def test_a_launch_is_a_run_with_metrics_parameters_and_its_parent(
    place: Store, choose: Choose, tmp_path: Path
) -> None:
    import mlflow

    choose(place.uri, "launches")
    with mlflow.start_run(run_name="mine") as mine:
        checkpoints = str(tmp_path / "checkpoints")
        feeding = Feeding(fed=False)
        with launch(falling, 10.0, checkpoint_dir=checkpoints, feeding=feeding) as cluster:
            cluster.results(SOON_S)
    assert sparkdl.mlflow.flush(SOON_S)
    run = place.runs("launches")["sparkdl launch"]
    assert run.status == "FINISHED"
    assert run.tags["mlflow.parentRunId"] == mine.info.run_id
    params = run.params
    assert params["nodes"] == "2"
    assert params["framework"] == "plain"
    assert params["is_fed"] == "False"
    assert params["checkpoint_dir"].endswith("/checkpoints")
    assert place.history(run, "loss") == {0: 10.0, 1: 9.0, 2: 8.0}
    assert place.history(run, "worker-1/loss") == {0: 11.0, 1: 10.0, 2: 9.0}


@pytest.mark.smoke
@pytest.mark.usefixtures("tracked")
def test_failure_is_told_by_root_cause_an_interrupt_is_not(place: Store, choose: Choose) -> None:
    def fail(args: None, ctx: NodeContext) -> None:
        raise ValueError("no such kind")

    choose(place.uri, "failures")
    with pytest.raises(NodeFailedError), launch(fail, nodes=1) as cluster:
        cluster.wait(SOON_S)
    choose(place.uri, "interrupts")
    with pytest.raises(KeyboardInterrupt), launch(falling, 1.0, nodes=1):
        raise KeyboardInterrupt
    assert sparkdl.mlflow.flush(SOON_S)
    run = place.runs("failures")["sparkdl launch"]
    assert run.status == "FAILED"
    assert run.tags["sparkdl.failure"].startswith("worker:0 (rank 0")
    text = Path(run.artifacts.removeprefix("file://"), "failure.txt").read_text()
    assert "Traceback" in text
    assert "ValueError: no such kind" in text
    assert place.runs("interrupts")["sparkdl launch"].status == "KILLED"


@pytest.mark.smoke
@pytest.mark.usefixtures("tracked")
def test_trials_are_nested_in_the_run_of_their_search(place: Store, choose: Choose) -> None:
    pytest.importorskip("optuna")
    from sparkdl import search

    def objective(params: dict[str, Any], ctx: NodeContext) -> float:
        if params["x"] == 3.0:
            raise ValueError("three")
        ctx.report(0, loss=params["x"])
        return float(params["x"])

    choose(place.uri, "trials")
    import optuna

    sampler = optuna.samplers.GridSampler({"x": [2.0, 3.0]})
    options: Any = {"executor": "local", "observe": Observe(dashboard=False)}

    def space(trial: Any) -> dict[str, Any]:
        return {"x": trial.suggest_categorical("x", [2.0, 3.0])}

    study = optuna.create_study(sampler=sampler)
    search(None, objective, space, trials=2, parallelism=2, study=study, **options)
    assert sparkdl.mlflow.flush(SOON_S)
    found = place.runs("trials")
    parent = found.pop("sparkdl search")
    assert parent.params["best_x"] == "2.0"
    assert parent.metrics["best_value"] == 2.0
    assert sorted(found) == ["sparkdl trial 0", "sparkdl trial 1"]
    by_x = {run.params["x"]: run for run in found.values()}
    for run in found.values():
        assert run.tags["mlflow.parentRunId"] == parent.run_id
    assert by_x["2.0"].metrics.items() >= {"value": 2.0, "loss": 2.0}.items()
    assert {x: run.status for x, run in by_x.items()} == {"2.0": "FINISHED", "3.0": "FAILED"}


@pytest.mark.usefixtures("tracked")
@pytest.mark.deep
def test_a_server_that_is_gone_or_never_answers_harms_no_training(
    choose: Choose, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:  # it accepts, and is silent
        port = listener.getsockname()[1]
        choose(f"http://127.0.0.1:{port}", "none")
        monkeypatch.setattr(tracker, "_MAX_WAITING", 2)
        with launch(falling, 3.0) as cluster:
            assert cluster.results(SOON_S) == [3.0, 3.0]
        assert not sparkdl.mlflow.flush(0.1), "it still waits for the answer"
        lost = [record for record in caplog.records if "is not in MLflow" in record.message]
        assert len(lost) == 1, "of all metrics that are dropped, one warning"
        assert "slower than the training" in lost[0].message
        assert lost[0].levelno == logging.WARNING
    assert sparkdl.mlflow.flush(SOON_S), "the connection has broken, and nothing else is tried"
    with launch(falling, 4.0) as cluster:  # nobody listens there any more
        assert cluster.results(SOON_S) == [4.0, 4.0]
    assert sparkdl.mlflow.flush(SOON_S)


@pytest.mark.smoke
def test_nothing_is_tracked_once_it_is_disabled(choose: Choose, tmp_path: Path) -> None:
    choose(f"sqlite:///{tmp_path}/runs.db", "disabled")
    sparkdl.mlflow.autolog()
    sparkdl.mlflow.autolog(disable=True)
    with launch(lambda args, ctx: None, nodes=1) as cluster:
        cluster.wait(SOON_S)
    assert sparkdl.mlflow.flush(SOON_S)
    assert not (tmp_path / "runs.db").exists()
