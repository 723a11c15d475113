"""Hyper-parameter search: trials in parallel over sub-clusters, run and chosen by Optuna.

https://optuna.readthedocs.io/en/stable/reference/generated/optuna.study.Study.html
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError, FrameworkMissingError, ResultError
from sparkdl.core.options import Feeding
from sparkdl.core.tracking import tracked
from sparkdl.driver.executors.sessions import active_session, inheritance, inheriting_thread
from sparkdl.driver.handle import Cluster
from sparkdl.driver.launch import launch
from sparkdl.driver.options import LaunchOptions, reads_own_data
from sparkdl.driver.threads import begin

if TYPE_CHECKING:
    import optuna
    from pyspark.sql import SparkSession
    from typing_extensions import Unpack

Space = Callable[["optuna.Trial"], dict[str, Any]]
Objective = Callable[[dict[str, Any], Any], Any]
_LOOK_S = 5.0


def search(
    spark: SparkSession | None,
    objective: Objective,
    space: Space,
    *,
    trials: int,
    parallelism: int = 1,
    nodes: int = 1,
    metric: str = "value",
    study: optuna.Study | None = None,
    **options: Unpack[LaunchOptions],
) -> optuna.Study:
    """Search for the parameters with which `objective(params, ctx)` is best.

    Each trial is a sub-cluster of `nodes` nodes that all run `objective`. Rank 0's value counts: a
    number, or a dict with `metric`. `ctx.report(step, **{metric: value})` on rank 0 is seen by the
    driver, and the pruner may end the trial. Trials that fail are recorded, with the user attribute
    "error".

    Args:
        spark: the session; None for the active one, or with `executor="local"`.
        objective: `map_fun` of each trial, with its parameters as `args`.
        space: returns the parameters of Optuna's trial: `lambda trial: {"units":
            trial.suggest_int("units", 16, 64)}`.
        trials: how many, failed and pruned trials included.
        parallelism: how many at once; their launches take turns.
        study: `optuna.create_study(…)`, which knows direction, sampler, pruner and storage. By
            default one that minimizes, and prunes no trial.
        options: of `sparkdl.launch`: `framework`, `max_restarts`, … By default `map_fun` reads
            its own data, and no framework is imported.

    Raises:
        ConfigError: if an argument is invalid; nothing was started.
        FrameworkMissingError: without Optuna: pip install optuna.
        ResultError: if trials have failed and none is complete.

    Returns:
        Optuna's study: `best_params`, `best_value`, `trials`, `trials_dataframe()`.
    """
    study = _checked(study, nodes=nodes, trials=trials, parallelism=parallelism)
    import optuna

    if spark is None and options.get("executor") != "local":
        spark = active_session()  # which other threads do not know
    options["feeding"] = reads_own_data(options.get("feeding", Feeding()))
    options.setdefault("framework", "plain")
    # An interrupt comes in the main thread alone, and trials run in others.
    stop = threading.Event()
    inherit, before = inheritance(spark), len(study.get_trials(deepcopy=False))

    def try_one(trial: optuna.Trial) -> float:
        if stop.is_set():
            study.stop()
            raise optuna.TrialPruned("the search was interrupted")
        inherit()
        try:
            params = dict(space(trial))
            with tracked("trial", number=trial.number, params=params) as note:
                with launch(spark, objective, params, nodes, **options) as cluster:
                    _watch(cluster, metric, trial, stop)
                    value = value_of(cluster.results()[0], metric)
                note(value=value)
        except optuna.TrialPruned:
            raise
        except Exception as error:
            trial.set_user_attr("error", f"{type(error).__name__}: {error}")
            raise
        return value

    facts = {"trials": trials, "parallelism": parallelism, "direction": study.direction.name}
    with tracked("search", params=facts) as note:
        context = copy_context()  # what this thread is in the midst of
        # In a thread of its own: Optuna waits for running trials when it is interrupted.
        optimize = partial(
            study.optimize,
            lambda trial: context.copy().run(try_one, trial),
            n_trials=trials,
            n_jobs=min(parallelism, trials),
            catch=(Exception,),
        )
        try:
            begin(optimize, "sparkdl-search", partial(inheriting_thread, spark)).result()
        except BaseException:
            stop.set()  # running trials end, and no other starts
            raise
        mine = study.get_trials(deepcopy=False)[before:]
        if any(trial.state is optuna.trial.TrialState.COMPLETE for trial in mine):
            note(best=study.best_trial)
        elif failed := [trial for trial in mine if trial.state is optuna.trial.TrialState.FAIL]:
            error = failed[0].user_attrs.get("error", "its value was NaN")
            raise ResultError(f"none of {len(mine)} trials is complete; the first error: {error}")
    return study


def _checked(study: optuna.Study | None, **numbers: int) -> optuna.Study:
    for name, number in numbers.items():
        if number < 1:
            raise ConfigError(f"{name}={number} must be at least 1")
    try:
        import optuna
    except ImportError as error:
        raise FrameworkMissingError(
            "hyper-parameter search needs Optuna on the driver: pip install optuna"
        ) from error
    if study is not None and len(study.directions) > 1:
        raise ConfigError(
            f"study= has {len(study.directions)} objectives, and must have one: a trial has one "
            "value here"
        )
    return study or optuna.create_study(pruner=optuna.pruners.NopPruner())


def _watch(cluster: Cluster, metric: str, trial: optuna.Trial, stop: threading.Event) -> None:
    """Hand on what rank 0 reports, until the nodes have returned.

    Raises:
        optuna.TrialPruned: if the pruner says so, or `stop` is set.
    """
    import optuna

    last = -1
    while True:
        if stop.is_set():
            raise optuna.TrialPruned("the search was interrupted")
        step, metrics = cluster.reported(last, _LOOK_S)
        if step > last:
            last = step
            if metric in metrics:
                trial.report(metrics[metric], step)
                if trial.should_prune():
                    raise optuna.TrialPruned
            continue
        # Nothing was reported for a while: look whether the nodes have returned.
        with suppress(TimeoutError):
            cluster.wait(0.0)
            return


def value_of(result: Any, metric: str) -> float:
    """Return the number in what an objective returned: itself, or its entry `metric`."""
    value: Any = result.get(metric) if isinstance(result, Mapping) else result
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ResultError(
            f"the objective returned {result!r} on rank 0: must be a number, or a dict with "
            f"{metric!r}"
        ) from None
