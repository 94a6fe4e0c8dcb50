"""What this server runs on: the program and the packages that its figures depend on, with their versions.

Knows installed packages; knows no page and no route.
"""

from __future__ import annotations

import platform
from importlib import metadata

from app.api_route import program_version

PROGRAM = "qevict-lab"
PACKAGES = ("torch", "transformers", "safetensors", "numpy", "gradio", "fastapi", "sqlite-utils", "plotly")


def versions() -> list[tuple[str, str]]:
    """(name, version), the program first; packages that are absent are left out."""
    found = [(PROGRAM, program_version()), ("Python", platform.python_version())]
    for name in PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return found
