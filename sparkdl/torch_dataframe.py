"""The rows of a process in the file that pyspark's own loader of PyTorch reads.

Runs in: driver, child

pyspark's estimators train by a function that reads its rows with
`pyspark.ml.torch.distributor._get_spark_partition_data_loader`, which finds them through two
environment variables: an Arrow stream, and the schema of the DataFrame as JSON.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkdl.core.errors import ConfigError
from sparkdl.node.context import current

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ROWS = "SPARK_PARTITION_ARROW_DATA_FILE"
_SCHEMA = "SPARK_DATAFRAME_SCHEMA_FILE"
_BATCH = 10_000
_DENSE = {"type": "array", "elementType": "double", "containsNull": False}


@dataclass(frozen=True)
class OnRows:
    """A function that is called when the rows of its process are there.

    Attributes:
        schema: of the DataFrame, as JSON. Vectors are arrays in it, as a feed gives them.
    """

    train: Callable[..., Any]
    schema: str

    @classmethod
    def of(cls, train: Callable[..., Any], frame: DataFrame) -> OnRows:
        """Return what reads the rows of `frame`."""
        schema = frame.schema.jsonValue()
        for field in schema["fields"]:
            if isinstance(field["type"], dict) and field["type"]["type"] == "udt":
                field["type"] = _DENSE
        return cls(train, json.dumps(schema))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Write the rows that are fed to this process, and call the function.

        Raises:
            ConfigError: if there are none.
        """
        ctx = current()
        assert ctx is not None
        with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
            rows, schema = Path(folder, "data.arrow"), Path(folder, "schema.json")
            if not _write(ctx.batches(_BATCH, even=False), rows):
                raise ConfigError(
                    f"rank {ctx.rank} of {ctx.num_workers} has no rows: the DataFrame is empty or "
                    "has fewer rows than num_processes"
                )
            schema.write_text(self.schema, encoding="utf-8")
            os.environ.update({_ROWS: str(rows), _SCHEMA: str(schema)})
            try:
                return self.train(*args, **kwargs)
            finally:
                del os.environ[_ROWS], os.environ[_SCHEMA]


def _write(batches: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write an Arrow stream; return how many rows it has."""
    count = 0
    with path.open("wb") as file:
        writer = None
        for batch in batches:
            table = pa.table({name: _column(values) for name, values in batch.items()})
            writer = writer or pa.ipc.new_stream(file, table.schema)
            writer.write_table(table)
            count += table.num_rows
        if writer is not None:
            writer.close()
    return count


def _column(values: Any) -> pa.Array:
    """Return `values`, `[rows]` or `[rows, n]`, as Spark has them: numbers, or lists."""
    return pa.array(values if values.ndim == 1 else list(values))
