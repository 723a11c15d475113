"""Links to the documentation, for errors and help texts."""

from __future__ import annotations

import os


def docs_page(name: str, section: str = "") -> str:
    """Return the link to a page of docs/: its path in the repository, or its address on a site.

    The site is the one that `make docs` builds. SPARKDL_DOCS_URL is the address of its home page,
    which may hold a version: https://docs.example.org/sparkdl/0.1.
    """
    site = os.environ.get("SPARKDL_DOCS_URL", "").rstrip("/")
    page = f"{site}/docs/{name}.html" if site else f"docs/{name}.md"
    return f"{page}#{section}" if section else page
