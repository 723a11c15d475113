"""Ends without a word to its cluster."""

from __future__ import annotations

from tests.doubles.drivers.driver import start
from tests.doubles.map_funs import hang

cluster = start(hang)
