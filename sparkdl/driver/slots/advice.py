"""Spark's settings for speed and encryption: advice on the first, detection of the second."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ARROW = "spark.sql.execution.arrow"
_UNIX_SOCKETS_SINCE = (4, 1)
_FEW_ROWS = 1000
# Arrow's strings and binaries have 32-bit offsets unless `useLargeVarTypes` is set.
_MAX_VAR_NBYTES = 2**31
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True)
class Advice:
    setting: str
    why: str
    level: int = logging.INFO


def costly_settings(get: Callable[[str, None], Any], version: str) -> list[Advice]:
    """Return the settings that make feeding slower or batches fail; none if all is well.

    Args:
        get: returns a setting of Spark's, or the second argument where it is not set.
        version: Spark's.
    """

    def conf(name: str, default: str = "") -> str:
        value = get(name, None)
        return default if value is None else str(value)

    found = []
    unix = "spark.python.unix.domain.socket.enabled"
    if _release(version) >= _UNIX_SOCKETS_SINCE and not is_true(conf(unix)):
        why = (
            "rows go from the JVM to Python by TCP; by a Unix socket feeding was 30 to 50 % faster"
        )
        found.append(Advice(f"{unix}=true", f"{why}. To be set before the session starts"))
    rows = conf(f"{_ARROW}.maxRecordsPerBatch")
    if rows.isdigit() and 0 < int(rows) < _FEW_ROWS:
        why = f"batches of {rows} rows cost more in passing them on than in their rows"
        found.append(Advice(f"{_ARROW}.maxRecordsPerBatch=10000", why))
    nbytes = _nbytes(conf(f"{_ARROW}.maxBytesPerBatch", "64m"))
    is_large = is_true(conf(f"{_ARROW}.useLargeVarTypes"))
    if not is_large and (nbytes <= 0 or nbytes >= _MAX_VAR_NBYTES):
        why = "batches are not bounded, and one with 2 GiB of strings or binary in a column fails"
        found.append(Advice(f"{_ARROW}.maxBytesPerBatch=64m", why, logging.WARNING))
    if is_true(conf("spark.speculation")):
        why = (
            "a feeding task that waits for the trainer looks slow, and its partition is read twice"
        )
        found.append(Advice("spark.speculation=false", why, logging.WARNING))
    if is_true(conf("spark.dynamicAllocation.enabled")):
        why = "executors that idle between two feeds are removed and have to be started again"
        found.append(Advice("spark.dynamicAllocation.minExecutors to those you need", why))
    if conf("spark.python.worker.reuse", "true").lower() == "false":
        why = "every feeding task starts its own Python and imports pyarrow again"
        found.append(Advice("spark.python.worker.reuse=true", why, logging.WARNING))
    return found


def encrypting_setting(spark: SparkSession) -> str:
    """Return the setting by which Spark encrypts its own connections; empty if it does not.

    https://spark.apache.org/docs/latest/security.html#network-encryption
    """
    names = (
        "spark.network.crypto.enabled",
        "spark.ssl.rpc.enabled",
        "spark.ssl.enabled",
        "spark.authenticate.enableSaslEncryption",
    )
    return next((name for name in names if is_true(spark.conf.get(name, None))), "")


def is_true(value: str | None) -> bool:
    """Return whether a setting of Spark's is true."""
    return value is not None and value.lower() == "true"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _nbytes(text: str) -> int:
    """Return how many bytes Spark takes `text` for, like `64m`, `64MB`, `67108864`."""
    found = re.fullmatch(r"(-?\d+)\s*([kmgt]?)i?b?", text.strip().lower())
    return int(found[1]) * _UNITS.get(found[2], 1) if found else 1
