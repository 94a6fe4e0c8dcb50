"""The version that runs, exports and answers name; the same as in pyproject.toml."""

VERSION = "0.1.0"
