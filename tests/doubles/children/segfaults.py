"""Reads address zero."""

from __future__ import annotations

import ctypes

ctypes.string_at(0)
