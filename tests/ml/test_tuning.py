"""A search: trials in parallel, pruned ones, failed ones, the same ones again; without Spark."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from sparkdl import search
from sparkdl.core.errors import ConfigError, FrameworkMissingError, ResultError
from sparkdl.ml.tuning import PrunedError, _Search
from tests.ml.train_fns import curve

pytestmark = pytest.mark.timeout(200)
LOCAL: Any = {"executor": "local"}
SPACE: dict[str, Any] = {
    "x": optuna.distributions.FloatDistribution(-3, 3),
    "n": (1, 4),
    "kind": ["a", "b"],
}


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
    kinds = ["endless", "fails", "a", "a"]
    for number, kind in enumerate(kinds):
        study.enqueue_trial({"x": 0.5 * number, "n": number + 1, "kind": kind})
    space = {**SPACE, "kind": ["a", "fails", "endless"]}
    options: Any = {"parallelism": 2, "nodes": 2, "metric": "loss", "study": study}
    found = search(None, curve, space, trials=4, **options, **LOCAL)
    assert [t.state for t in found.trials] == ["pruned", "fail", "complete", "complete"]
    assert found.best.number == 2
    assert found.best.value == 1.0 + 3
    endless, fails, *_ = found.trials
    assert endless.reports[0][1] >= 100
    assert endless.value is not None
    assert "ValueError: no such kind" in fails.error
    states = [trial.state.name for trial in study.trials]
    assert states == ["PRUNED", "FAIL", "COMPLETE", "COMPLETE"]
    frame = found.to_pandas()
    assert list(frame["state"]) == [t.state for t in found.trials]
    assert list(frame["params_kind"]) == kinds
    assert frame["error"].str.contains("no such kind").tolist() == [False, True, False, False]


def test_trial_whose_value_is_nan_fails_and_the_others_go_on() -> None:
    def objective(params: dict[str, Any], _ctx: Any) -> float:
        return float("nan") if params["n"] == 1 else 2.0

    study = optuna.create_study()
    for n in (1, 2):
        study.enqueue_trial({"n": n})
    found = search(None, objective, {"n": (1, 2)}, trials=2, study=study, **LOCAL)
    assert [(t.state, t.value) for t in found.trials] == [("fail", None), ("complete", 2.0)]
    assert found.trials[0].error.startswith("ResultError: the value is NaN")


def test_trial_that_another_ones_error_ends_before_its_first_report_is_pruned() -> None:
    def run(_params: dict[str, Any], _report: Any) -> float:
        raise PrunedError

    study = optuna.create_study()
    found = _Search(study, {"n": (1, 2)}, run, trials=1, parallelism=1, spark=None)
    found._try(*found._ask())
    assert [(t.state, t.value) for t in found._records] == [("pruned", None)]
    assert study.trials[0].state is optuna.trial.TrialState.PRUNED


def test_the_seed_is_the_samplers() -> None:
    def objective(params: dict[str, Any], _ctx: Any) -> float:
        return float(params["x"])

    options: Any = {"trials": 2, "seed": 5, "direction": "maximize", **LOCAL}
    found = search(None, objective, SPACE, **options)
    assert found.best.value == max(t.params["x"] for t in found.trials)
    sampler = optuna.samplers.TPESampler(seed=5)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(lambda trial: objective(suggested(trial), None), n_trials=2)
    assert [t.params for t in found.trials] == [t.params for t in study.trials]


def suggested(trial: Any) -> dict[str, Any]:
    return {
        "x": trial.suggest_float("x", -3, 3),
        "n": trial.suggest_int("n", 1, 4),
        "kind": trial.suggest_categorical("kind", ["a", "b"]),
    }


def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    study = optuna.create_study()
    several = optuna.create_study(directions=["minimize", "maximize"])
    for options, space, match in (
        ({"trials": 0}, SPACE, "trials=0 must be at least 1"),
        ({"nodes": 0}, SPACE, "nodes=0"),
        ({}, {"x": "abc"}, r"space\['x'\]='abc'"),
        ({}, {"x": (3, 1)}, "low"),
        ({"study": study, "seed": 1}, SPACE, "leave out sampler"),
        ({"study": several}, SPACE, "2 objectives, and must have one"),
        ({"direction": "up"}, SPACE, "choose 'minimize'"),
    ):
        asked: Any = {"trials": 1, **options}
        with pytest.raises(ConfigError, match=match):
            search(None, curve, space, **asked)
    text = search(None, lambda _params, _ctx: "good", SPACE, trials=1, **LOCAL)
    with pytest.raises(ResultError, match=r"none of 1 trials is complete.*a number is needed"):
        _ = text.best
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(FrameworkMissingError, match="pip install optuna"):
        search(None, curve, SPACE, trials=1)
