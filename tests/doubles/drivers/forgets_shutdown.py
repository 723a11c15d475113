"""Ends without a word to its cluster."""

from __future__ import annotations

from driver import start

from tests.doubles.map_funs import hang

cluster = start(hang)
