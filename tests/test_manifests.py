"""The manifests that the documentation shows are what Kubernetes takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "deployment.md"

pytestmark = pytest.mark.deep  # the schemas are large


def manifests() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    found = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [yaml.safe_load(text) for text in found]


def test_manifests_of_the_documentation_fit_the_schema_of_kubernetes() -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    shown = manifests()
    assert {each["kind"] for each in shown} == {"Pod", "NetworkPolicy"}
    for each in shown:
        schemas.validate(each, schemas.latest_version(), strict=True)
