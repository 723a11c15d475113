"""The collector rests for a while."""

from __future__ import annotations

import gc

import pytest

from sparkdl.core.garbage import uncollected


def test_collector_is_off_inside_and_on_again_also_after_an_error() -> None:
    with pytest.raises(OSError, match="inside"), uncollected():
        assert not gc.isenabled()
        raise OSError("inside")
    assert gc.isenabled()


def test_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
