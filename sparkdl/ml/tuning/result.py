"""What came of a hyper-parameter search.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import FrameworkMissingError, ResultError

if TYPE_CHECKING:
    import optuna
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession


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
    """What a search returns.

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
        done = [trial for trial in self.trials if trial.state == "complete"]
        if not done:
            errors = [trial.error for trial in self.trials if trial.error]
            raise ResultError(
                f"none of {len(self.trials)} trials is complete"
                f"{f'; the first error: {errors[0]}' if errors else ''}"
            )
        sign = -1 if self.study.direction.name == "MAXIMIZE" else 1
        return min(done, key=lambda trial: sign * (trial.value or 0.0))

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
        schema = ", ".join(
            [
                *("number int", "state string", "value double", "seconds double", "steps int"),
                "error string",
                *(f"`{name}` string" for name in params),
            ]
        )
        texts = [
            {**row, **{name: str(row[name]) for name in params if name in row}} for row in rows
        ]
        names = ["number", "state", "value", "seconds", "steps", "error", *params]
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
