"""Hyper-parameter search: trials in parallel over sub-clusters, chosen by Optuna's ask and tell.

Runs in: driver

https://optuna.readthedocs.io/en/stable/tutorial/20_recipes/009_ask_and_tell.html
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from pyspark.ml.base import Estimator
from pyspark.ml.evaluation import Evaluator
from pyspark.sql import DataFrame

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, FrameworkMissingError, ResultError
from sparkdl.core.jobs import named_jobs
from sparkdl.core.options import Feeding
from sparkdl.core.spelling import did_you_mean
from sparkdl.core.tracking import tracked
from sparkdl.driver.executors.sessions import active_session, inheriting_thread
from sparkdl.driver.handle import Cluster
from sparkdl.driver.launch import launch
from sparkdl.driver.options import reads_own_data
from sparkdl.driver.threads import begin

if TYPE_CHECKING:
    import optuna
    import pandas as pd
    from pyspark.sql import SparkSession
    from typing_extensions import Unpack

    from sparkdl.driver.options import LaunchOptions

    Space = Mapping[str, Any] | Callable[[optuna.Trial], dict[str, Any]]

_log = logging.getLogger(__name__)
Direction = Literal["minimize", "maximize"]
Run = Callable[[dict[str, Any], Callable[[int, float], bool]], float]
Objective = Callable[[dict[str, Any], Any], Any]
_LOOK_S = 5.0


def search(  # noqa: PLR0913 (one option, one name)
    spark: SparkSession | None,
    objective: Objective,
    space: Space,
    *,
    trials: int,
    parallelism: int = 1,
    nodes: int = 1,
    metric: str = "value",
    direction: Direction = "minimize",
    study: optuna.Study | None = None,
    sampler: optuna.samplers.BaseSampler | None = None,
    pruner: optuna.pruners.BasePruner | None = None,
    seed: int | None = None,
    trial_timeout_s: float | None = None,
    **options: Unpack[LaunchOptions],
) -> SearchResult:
    """Search for the parameters with which `objective(params, ctx)` is best.

    Each trial is a sub-cluster of `nodes` nodes that all run `objective`. Rank 0's value counts: a
    number, or a dict with `metric`. `ctx.report(step, **{metric: value})` on rank 0 is seen by the
    driver, and the pruner may end the trial. Trials that fail are recorded.

    Args:
        spark: the session; None for the active one, or with `executor="local"`.
        objective: `map_fun` of each trial, with its parameters as `args`.
        space: parameter to its values: a list of choices, `(low, high)` for whole numbers or
            floats, or a distribution of Optuna; or a function from Optuna's trial to parameters.
        trials: how many, failed and pruned trials included.
        parallelism: how many at once; their launches take turns.
        study: Optuna's study, to continue, or with a storage of its own; then leave out
            `direction`, `sampler`, `pruner` and `seed`, which it has already.
        sampler, pruner: Optuna's; by default TPE, and no pruning.
        seed: of the sampler. With `parallelism=1` the same seed gives the same trials.
        trial_timeout_s: seconds after which a trial fails.
        options: of `sparkdl.launch`: `framework`, `max_restarts`, … By default `map_fun` reads
            its own data, and no framework is imported.

    Raises:
        ConfigError: if an argument is invalid; nothing was started.
        FrameworkMissingError: without Optuna: pip install optuna.
    """
    if nodes < 1:
        raise ConfigError(f"nodes={nodes} must be at least 1")
    found = _study(study, direction, sampler, pruner, seed)
    if spark is None and options.get("executor") != "local":
        spark = active_session()  # which other threads do not know
    options["feeding"] = reads_own_data(options.get("feeding", Feeding()))
    options.setdefault("framework", "plain")
    # An interrupt comes in the main thread alone, and trials run in others.
    stop = threading.Event()

    def run(params: dict[str, Any], report: Callable[[int, float], bool]) -> float:
        deadline = Deadline.after(trial_timeout_s)
        with launch(spark, objective, params, nodes, **options) as cluster:
            _watch(cluster, metric, report, deadline, stop)
            results = cluster.results(deadline.wait_s)
        return value_of(results[0], metric)

    try:
        return _Search(found, space, run, trials, parallelism, spark).run()
    except BaseException:
        stop.set()  # it ends the running trials
        raise


def search_estimator(  # noqa: PLR0913 (one option, one name)
    estimator: Estimator[Any],
    evaluator: Evaluator,
    train: DataFrame,
    validation: DataFrame,
    space: Space,
    *,
    trials: int,
    parallelism: int = 1,
    study: optuna.Study | None = None,
    sampler: optuna.samplers.BaseSampler | None = None,
    seed: int | None = None,
) -> SearchResult:
    """Search for the parameters with which a stage, or a pipeline of them, is best.

    A trial fits a copy of `estimator` to `train`; the evaluator's metric of the model on
    `validation` is its value. See `search` for the other arguments and errors.

    Args:
        space: names are those of the estimator's parameters; of a pipeline's stages `stage.param`,
            with the stage's number from 0.
    """
    found = _study(
        study, "maximize" if evaluator.isLargerBetter() else "minimize", sampler, None, seed
    )

    def run(params: dict[str, Any], report: Callable[[int, float], bool]) -> float:
        values = {_param(estimator, name): value for name, value in params.items()}
        model = estimator.fit(train, values)
        with named_jobs(validation.sparkSession, "sparkdl", "search, evaluation"):
            return float(evaluator.evaluate(model.transform(validation)))

    if isinstance(space, Mapping):
        for name in space:
            _param(estimator, name)
    return _Search(found, space, run, trials, parallelism, train.sparkSession).run()


class _Search:
    """Runs the trials, in as many threads as trials may run at once."""

    def __init__(
        self,
        study: optuna.Study,
        space: Space,
        run: Run,
        trials: int,
        parallelism: int,
        spark: SparkSession | None,
    ) -> None:
        for name, number in (("trials", trials), ("parallelism", parallelism)):
            if number < 1:
                raise ConfigError(f"{name}={number} must be at least 1")
        self._study, self._run, self._thread = study, run, partial(inheriting_thread, spark)
        self._space = _distributions(space) if isinstance(space, Mapping) else space
        self._left, self._parallelism = trials, min(parallelism, trials)
        self._lock = threading.Lock()
        self._records: list[TrialRecord] = []

    def run(self) -> SearchResult:
        direction = self._study.direction.name.lower()
        facts = {"trials": self._left, "parallelism": self._parallelism, "direction": direction}
        with tracked("search", params=facts) as note:
            found = self._run_all()
            note(best=next(iter(found.ranked), None))
        return found

    def _run_all(self) -> SearchResult:
        workers = [  # each with what this thread is in the midst of
            begin(partial(copy_context().run, self._work), f"sparkdl-trials-{number}", self._thread)
            for number in range(self._parallelism)
        ]
        try:
            for worker in workers:
                worker.result()
        except BaseException:
            with self._lock:
                self._left = 0  # running trials finish; no other starts
            raise
        return SearchResult(self._study, tuple(sorted(self._records, key=lambda r: r.number)))

    def _work(self) -> None:
        while True:
            with self._lock:  # a study is not meant for several threads
                if not self._left:
                    return
                self._left -= 1
                trial, params = self._ask()
            self._try(trial, params)

    def _ask(self) -> tuple[optuna.Trial, dict[str, Any]]:
        if callable(self._space):
            trial = self._study.ask()
            return trial, dict(self._space(trial))
        trial = self._study.ask(self._space)
        return trial, dict(trial.params)

    def _try(self, trial: optuna.Trial, params: dict[str, Any]) -> None:
        import optuna

        state, value, error = optuna.trial.TrialState.COMPLETE, None, ""
        reports: list[tuple[int, float]] = []

        def report(step: int, metric: float) -> bool:
            reports.append((step, metric))
            with self._lock:
                trial.report(metric, step)
                return trial.should_prune()

        start_s = time.monotonic()
        try:
            with tracked("trial", number=trial.number, params=params) as note:
                value = self._run(params, report)
                note(value=value)
            if math.isnan(value):
                # Optuna refuses it, and a sampler could not compare it.
                raise ResultError("the value is NaN: the objective must return a number")
        except PrunedError:
            state = optuna.trial.TrialState.PRUNED
            value = reports[-1][1] if reports else None  # none if another trial stopped the search
        except Exception as problem:  # noqa: BLE001 (a trial may fail in any way)
            state, value = optuna.trial.TrialState.FAIL, None
            error = f"{type(problem).__name__}: {problem}"
            _log.warning("Trial %d with %s failed: %s", trial.number, params, error)
        seconds = time.monotonic() - start_s
        with self._lock:
            if error:
                trial.set_user_attr("error", error)
            is_done = state is optuna.trial.TrialState.COMPLETE
            self._finish(trial, value if is_done else None, state)
            self._records.append(
                TrialRecord(
                    trial.number, state.name.lower(), params, value, tuple(reports), error, seconds
                )
            )
        if value is not None:
            _log.info("Trial %d with %s: %s %g", trial.number, params, state.name.lower(), value)

    def _finish(self, trial: optuna.Trial, value: float | None, state: Any) -> None:
        try:
            self._study.tell(trial, value, state)
        except RuntimeError as error:
            if "Study.stop" not in str(error):
                raise
            self._left = 0  # the sampler, of a grid for example, has nothing more to ask for


def _study(
    study: optuna.Study | None,
    direction: Direction,
    sampler: optuna.samplers.BaseSampler | None,
    pruner: optuna.pruners.BasePruner | None,
    seed: int | None,
) -> optuna.Study:
    try:
        import optuna
    except ImportError as error:
        raise FrameworkMissingError(
            "hyper-parameter search needs Optuna on the driver: pip install optuna"
        ) from error
    if study is not None:
        if any(given is not None for given in (sampler, pruner, seed)):
            raise ConfigError(
                "study= has a sampler and a pruner already: leave out sampler, pruner and seed"
            )
        if len(study.directions) > 1:
            raise ConfigError(
                f"study= has {len(study.directions)} objectives, and must have one: a trial has "
                "one value here"
            )
        return study
    if direction not in ("minimize", "maximize"):
        raise ConfigError(f"direction={direction!r}: choose 'minimize' or 'maximize'")
    if sampler is not None and seed is not None:
        raise ConfigError(f"seed={seed} is for the sampler that is made here: give yours its own")
    return optuna.create_study(
        direction=direction,
        sampler=sampler or optuna.samplers.TPESampler(seed=seed),
        pruner=pruner or optuna.pruners.NopPruner(),
    )


def _distributions(space: Mapping[str, Any]) -> dict[str, Any]:
    """Return Optuna's distributions.

    Raises:
        ConfigError: for what stands for none.
    """
    import optuna

    kinds = optuna.distributions
    found = {}
    for name, values in space.items():
        is_pair = isinstance(values, tuple) and len(values) == 2
        try:
            if isinstance(values, kinds.BaseDistribution):
                found[name] = values
            # Whole numbers first: they are floats to the next check as well.
            elif is_pair and all(isinstance(value, int) for value in values):
                found[name] = kinds.IntDistribution(*values)
            elif is_pair and all(isinstance(value, int | float) for value in values):
                found[name] = kinds.FloatDistribution(*values)
            elif isinstance(values, Sequence) and not isinstance(values, tuple | str):
                found[name] = kinds.CategoricalDistribution(values)
            else:
                raise ValueError("it is no list, no pair of numbers and no distribution")
        except ValueError as error:
            raise ConfigError(
                f"space[{name!r}]={values!r}: {error}. Give a list of choices, (low, high), or "
                "one of optuna.distributions"
            ) from error
    return found


def _param(estimator: Any, name: str) -> Any:
    stage, _, own = name.rpartition(".")
    owner = estimator
    try:
        owner = estimator.getStages()[int(stage)] if stage else estimator
        return owner.getParam(own)
    except (ValueError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"space has {name!r}, which is no parameter of {type(owner).__name__}; for a "
            "pipeline's stage, write 'number.parameter', like "
            f"'2.learning_rate'{did_you_mean(own, [param.name for param in owner.params])}"
        ) from error


class PrunedError(Exception):
    """The trial is not worth continuing."""


def _watch(
    cluster: Cluster,
    metric: str,
    report: Callable[[int, float], bool],
    deadline: Deadline,
    stop: threading.Event,
) -> None:
    """Hand on what rank 0 reports, until the nodes have returned or time is up.

    Raises:
        PrunedError: if `report` says so, or `stop` is set.
    """
    last = -1
    while not deadline.has_passed:
        if stop.is_set():
            raise PrunedError
        step, metrics = cluster.reported(last, min(_LOOK_S, deadline.remaining_s))
        if step > last:
            last = step
            if metric in metrics and report(step, metrics[metric]):
                raise PrunedError
            continue
        # Nothing was reported for a while: look whether the nodes have returned.
        with suppress(TimeoutError):
            cluster.wait(0.0)
            return


def value_of(result: Any, metric: str) -> float:
    """Return the number in what an objective returned: itself, or its entry `metric`.

    Raises:
        ResultError: if there is none.
    """
    value: Any = result.get(metric) if isinstance(result, Mapping) else result
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()
    # A bool is a Real to Python, and no metric.
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ResultError(
            f"the objective returned {result!r} on rank 0: a number is needed, or a dict with "
            f"{metric!r}"
        )
    return float(value)


@dataclass(frozen=True)
class TrialRecord:
    """One trial.

    Attributes:
        state: `complete`, `pruned` or `fail`.
        value: of the metric; the last reported one if it was pruned, None if it failed.
        reports: steps, and the metric then, as the driver saw them.
        error: why it failed; empty if it did not.
        seconds: that it took, from the wait for its turn to its end.
    """

    number: int
    state: str
    params: dict[str, Any]
    value: float | None
    reports: Sequence[tuple[int, float]]
    error: str
    seconds: float


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        study: Optuna's, for its plots and its importance of parameters.
        trials: of this search, by number.
    """

    study: optuna.Study
    trials: tuple[TrialRecord, ...]

    @property
    def best(self) -> TrialRecord:
        """The best of the trials that are complete.

        Raises:
            ResultError: if none is; it says why the first one failed.
        """
        done = self.ranked
        if not done:
            errors = [trial.error for trial in self.trials if trial.error]
            raise ResultError(
                f"none of {len(self.trials)} trials is complete"
                f"{f'; the first error: {errors[0]}' if errors else ''}"
            )
        return done[0]

    @property
    def ranked(self) -> tuple[TrialRecord, ...]:
        """The trials that are complete, the best one first."""
        done = [trial for trial in self.trials if trial.state == "complete"]
        sign = -1 if self.study.direction.name == "MAXIMIZE" else 1
        return tuple(sorted(done, key=lambda trial: sign * (trial.value or 0.0)))

    def to_pandas(self) -> pd.DataFrame:
        """Return one row a trial: number, state, value, seconds, steps, error, `params_…`.

        Raises:
            FrameworkMissingError: without pandas.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise FrameworkMissingError("to_pandas needs pandas: pip install pandas") from error
        return pd.DataFrame([self._row(trial) for trial in self.trials])

    def to_spark(self, spark: SparkSession) -> DataFrame:
        """Return the same as a Spark DataFrame; the parameters as one column of text each."""
        rows = [self._row(trial) for trial in self.trials]
        params = sorted({name for row in rows for name in row if name.startswith("params_")})
        texts = [{**row, **{n: str(row[n]) for n in params if n in row}} for row in rows]
        schema = "number int, state string, value double, seconds double, steps int, error string"
        names = [*(field.split()[0] for field in schema.split(", ")), *params]
        schema += "".join(f", `{name}` string" for name in params)
        return spark.createDataFrame([[row.get(name) for name in names] for row in texts], schema)

    def _row(self, trial: TrialRecord) -> dict[str, Any]:
        return {
            "number": trial.number,
            "state": trial.state,
            "value": trial.value,
            "seconds": trial.seconds,
            "steps": len(trial.reports),
            "error": trial.error,
            **{f"params_{name}": value for name, value in trial.params.items()},
        }
