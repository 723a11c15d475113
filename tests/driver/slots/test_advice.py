"""Settings of Spark that cost speed are named, and no others."""

from __future__ import annotations

import pytest

from sparkdl.driver.slots.advice import costly_settings

UNIX = "spark.python.unix.domain.socket.enabled"
ARROW = "spark.sql.execution.arrow"
FINE = {UNIX: "true"}


@pytest.mark.parametrize(
    ("conf", "version"),
    [
        (FINE, "4.3.0"),
        ({}, "4.0.2"),  # which has no Unix sockets
        ({**FINE, f"{ARROW}.maxRecordsPerBatch": "0"}, "4.1.0"),
        ({**FINE, f"{ARROW}.maxBytesPerBatch": "1g"}, "4.1.0"),
        ({**FINE, f"{ARROW}.maxBytesPerBatch": "-1", f"{ARROW}.useLargeVarTypes": "true"}, "4.3.0"),
        ({**FINE, "spark.speculation": "false", "spark.python.worker.reuse": "true"}, "4.3.0"),
    ],
)
def test_settings_that_cost_nothing_are_not_mentioned(conf: dict[str, str], version: str) -> None:
    assert costly_settings(conf.get, version) == []


@pytest.mark.parametrize(
    ("conf", "setting"),
    [
        ({UNIX: "false"}, f"{UNIX}=true"),
        ({}, f"{UNIX}=true"),
        ({**FINE, f"{ARROW}.maxRecordsPerBatch": "100"}, f"{ARROW}.maxRecordsPerBatch=10000"),
        ({**FINE, f"{ARROW}.maxBytesPerBatch": "-1"}, f"{ARROW}.maxBytesPerBatch=64m"),
        ({**FINE, f"{ARROW}.maxBytesPerBatch": "4 GB"}, f"{ARROW}.maxBytesPerBatch=64m"),
        ({**FINE, "spark.speculation": "true"}, "spark.speculation=false"),
        ({**FINE, "spark.dynamicAllocation.enabled": "true"},
         "spark.dynamicAllocation.minExecutors to those you need"),
        ({**FINE, "spark.python.worker.reuse": "false"}, "spark.python.worker.reuse=true"),
    ],
)  # fmt: skip
def test_setting_that_costs_speed_is_named(conf: dict[str, str], setting: str) -> None:
    assert [advice.setting for advice in costly_settings(conf.get, "4.3.0")] == [setting]
