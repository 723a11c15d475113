"""A search: trials in parallel, pruned ones, failed ones, the same ones again; without Spark."""

from __future__ import annotations

import signal
import threading
from typing import Any

import optuna
import pytest

from sparkdl import search
from sparkdl.core.errors import ConfigError, FrameworkMissingError, ResultError
from tests.doubles.until import until
from tests.ml.train_fns import curve

pytestmark = pytest.mark.timeout(200)
LOCAL: Any = {"executor": "local"}


def space(trial: Any) -> dict[str, Any]:
    return {
        "x": trial.suggest_float("x", -3, 3),
        "n": trial.suggest_int("n", 1, 4),
        "kind": trial.suggest_categorical("kind", ["a", "fails", "endless"]),
    }


def numbers(trial: Any) -> dict[str, Any]:
    return {"n": trial.suggest_int("n", 1, 2)}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(level)


def test_trials_run_in_parallel_are_pruned_and_fail_each_for_itself() -> None:
    study = optuna.create_study(
        sampler=optuna.samplers.RandomSampler(seed=1),
        pruner=optuna.pruners.ThresholdPruner(upper=50.0),
    )
    kinds = ["endless", "fails", "a"]
    for number, kind in enumerate(kinds):
        study.enqueue_trial({"x": 0.5 * number, "n": number + 1, "kind": kind})
    options: Any = {"parallelism": 2, "nodes": 2, "metric": "loss", "study": study}
    found = search(None, curve, space, trials=3, **options, **LOCAL)
    assert found is study
    states = [trial.state.name for trial in study.trials]
    assert states == ["PRUNED", "FAIL", "COMPLETE"]
    assert study.best_trial.number == 2
    assert study.best_value == 1.0 + 3
    endless, fails, *_ = study.trials
    assert min(endless.intermediate_values.values()) >= 100
    assert "ValueError: no such kind" in fails.user_attrs["error"]
    assert list(study.trials_dataframe()["params_kind"]) == kinds


def test_interrupted_search_ends_its_trials_and_starts_no_other() -> None:
    ended: list[int] = []

    def objective(params: dict[str, Any], ctx: Any) -> float:
        step = 0
        while True:
            step += 1
            ctx.report(step, value=0.0)
            threading.Event().wait(0.1)

    class Interrupting(optuna.pruners.NopPruner):
        def prune(self, study: Any, trial: Any) -> bool:
            if not ended:
                signal.raise_signal(signal.SIGINT)
            ended.append(trial.number)
            return False

    study = optuna.create_study(pruner=Interrupting())
    with pytest.raises(KeyboardInterrupt):
        search(None, objective, numbers, trials=9, parallelism=2, study=study, **LOCAL)
    assert until(lambda: all(trial.state.is_finished() for trial in study.trials), 30.0)
    assert {trial.state.name for trial in study.trials} == {"PRUNED"}
    assert len(study.trials) < 9


def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    several = optuna.create_study(directions=["minimize", "maximize"])
    for options, match in (
        ({"trials": 0}, "trials=0 must be at least 1"),
        ({"nodes": 0}, "nodes=0"),
        ({"study": several}, "2 objectives, and must have one"),
    ):
        asked: Any = {"trials": 1, **options}
        with pytest.raises(ConfigError, match=match):
            search(None, curve, space, **asked)
    with pytest.raises(ResultError, match=r"none of 1 trials is complete.*must be a number"):
        search(None, lambda _params, _ctx: "good", space, trials=1, **LOCAL)
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(FrameworkMissingError, match="pip install optuna"):
        search(None, curve, space, trials=1)
