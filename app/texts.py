"""Every visible word, from assets/texts/*.toml, by language and flat key such as "live.run".

Knows files and placeholders; knows no page. Values are put in as they are: escaping is the page's.
"""

from __future__ import annotations

import logging
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from app.settings import ASSETS
from engine.errors import EngineError

log = logging.getLogger("qevict.texts")

LANGUAGES = ("en", "zh")
DEFAULT = "en"


class TextsError(EngineError, RuntimeError):
    """A file of texts is missing or not valid."""


class _Missing(dict[str, Any]):
    """Leaves a placeholder standing that no value came for."""

    def __missing__(self, key: str) -> str:
        return "{" + key + "}"


def language(wanted: str | None) -> str:
    """The offered language that is nearest to a tag such as "zh-CN"."""
    short = (wanted or DEFAULT).strip().lower().replace("_", "-").split("-")[0]
    return short if short in LANGUAGES else DEFAULT


def text(lang: str, key: str, **values: object) -> str:
    """The text of `key` with {placeholders} filled in; English where the language lacks it, else the key itself."""
    found = all_texts(lang).get(key)
    if found is None:
        log.warning("there is no text %r", key)
        return key
    return found.format_map(_Missing(values)) if values else found


def all_texts(lang: str) -> dict[str, str]:
    """All texts of a language by flat key, with placeholders; what it lacks is in English."""
    own = language(lang)
    return {**_load(DEFAULT), **(_load(own) if own != DEFAULT else {})}


@cache
def _load(lang: str) -> dict[str, str]:
    return read_texts(ASSETS / "texts" / f"{lang}.toml")


def read_texts(path: Path) -> dict[str, str]:
    """One file's texts by flat key.

    Raises:
        TextsError: the file is missing, is not TOML, or holds something that is not a text.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TextsError(f"{path} is missing: the program's files are not complete.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TextsError(f"{path} is not valid TOML: {error}.") from error
    out: dict[str, str] = {}
    _flatten(tables, "", out, path)
    return out


def _flatten(table: dict[str, Any], prefix: str, out: dict[str, str], path: Path) -> None:
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            _flatten(value, f"{key}.", out, path)
        elif isinstance(value, str):
            out[key] = value
        else:
            raise TextsError(f"{path}: {key} must be a text, got {value!r}.")
