"""A model of an estimator as MLflow keeps it: files, signature, input example.

Runs in: driver
"""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.jobs import named_jobs
from sparkdl.core.scratch import scratch_folder
from sparkdl.ml.estimators.source import TORCH
from sparkdl.ml.scoring.frames import FrameScorer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

_log = logging.getLogger(__name__)
_EXAMPLE_ROWS = 5


def save_model(
    client: Any, run_id: str, model: Any, dataset: DataFrame, with_example: bool
) -> None:
    """Save a model in a run, so that `mlflow.pyfunc` loads it.

    Args:
        model: a model with `score_of`, for example one that an estimator returned.
        dataset: the rows that it was trained on.
        with_example: whether the first rows are saved as well; Spark is asked for them.

    Raises:
        Exception: whatever MLflow raises.
    """
    import mlflow
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import Model

    try:
        scorer = FrameScorer(model.score_of(dataset.schema)[0])
    except ConfigError as error:
        _log.warning("The model of %s is not in MLflow: %s", model.uid, error)
        return
    signature = _signature(scorer, dataset.schema)
    example = _example(scorer, dataset) if with_example else None
    experiment = client.get_run(run_id).info.experiment_id
    with scratch_folder() as scratch:
        data, folder = scratch / "scorer", str(scratch / "model")
        data.mkdir()
        scorer.save(data)
        logged = client.create_logged_model(experiment, "model", run_id)
        mlflow.pyfunc.save_model(
            folder,
            loader_module="sparkdl.mlflow",
            data_path=str(data),
            mlflow_model=Model(
                logged.artifact_location,
                run_id,
                model_uuid=logged.model_id,
                model_id=logged.model_id,
            ),
            signature=signature,
            input_example=example,
            pip_requirements=_requirements(scorer),
        )
        client.log_model_artifacts(logged.model_id, folder)
        client.finalize_logged_model(logged.model_id, "READY")
        client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, 0)])


def _example(scorer: FrameScorer, dataset: DataFrame) -> Any:
    """Return the first rows as the model takes them; None if Spark does not give them."""
    names = [column.name for column in scorer.score.inputs]
    try:
        with named_jobs(dataset.sparkSession, "sparkdl", "MLflow, input example"):
            columns = [dataset[f"`{name}`"] for name in names]
            frame: Any = dataset.select(columns).limit(_EXAMPLE_ROWS).toPandas()
    except Exception as error:  # noqa: BLE001 (Spark has several; the model is worth saving)
        _log.warning("The model is in MLflow without an input example: %s", error)
        return None
    return frame.map(lambda cell: cell.toArray().tolist() if hasattr(cell, "toArray") else cell)


def _signature(scorer: FrameScorer, schema: StructType) -> Any:
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema
    from pyspark.sql.pandas.types import from_arrow_type

    inputs = [
        ColSpec(_kind(schema[column.name].dataType), column.name) for column in scorer.score.inputs
    ]
    outputs = [ColSpec(_kind(from_arrow_type(o.type)), o.name) for o in scorer.score.outputs]
    return ModelSignature(Schema(inputs), Schema(outputs))


def _kind(kind: DataType) -> Any:
    from mlflow.types import DataType as Kind
    from mlflow.types.schema import AnyType, Array
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import types as t

    if isinstance(kind, VectorUDT):
        return Array(Kind.double)
    if isinstance(kind, t.ArrayType):
        return Array(_kind(kind.elementType))
    names = {"tinyint": "integer", "smallint": "integer", "int": "integer", "bigint": "long"}
    name = kind.simpleString()
    known = ("float", "double", "boolean", "string", "binary")
    name = names.get(name, name)
    return Kind[name] if name in (*known, *names.values()) else AnyType()


def _requirements(scorer: FrameScorer) -> list[str]:
    wanted = ["sparkdl-cluster", "mlflow-skinny", "pandas", "pyarrow", "pyspark"]
    is_torch = scorer.score.source.format in TORCH
    wanted += ["torch"] if is_torch else ["tensorflow", "tensorflow-cpu", "keras"]
    found = []
    for name in wanted:
        try:
            found.append(f"{name}=={version(name)}")
        except PackageNotFoundError:  # another build of it, or it is on the executors only
            continue
    return found
