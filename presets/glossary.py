"""The terms of the glossary that are the same in every language: formula, and the file and name that compute it.

Knows the form of glossary.toml; knows no words and no page.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from engine.errors import ConfigError

PATH = Path(__file__).resolve().parent / "glossary.toml"
_KEYS = {"formula", "file", "code"}


class GlossaryError(ConfigError):
    """A glossary that can't be used; the text names file, term and rule."""


@dataclass(frozen=True, slots=True)
class Term:
    """One term.

    Attributes:
        id: its name in marked texts and in `data-term`.
        formula: text in which `_{..}` is below, `^{..}` above and `[a // b]` a fraction.
        file: path from the project's root. code: name of the function, class or method in it.
    """

    id: str
    formula: str
    file: str
    code: str


@cache
def load_terms(path: Path = PATH) -> tuple[Term, ...]:
    """All terms, in the order of the list.

    Raises:
        GlossaryError: unreadable, not TOML, or a term without one of its three texts.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise GlossaryError(f"{path}: the file must be readable TOML ({error}).") from error
    out = []
    for name, body in tables.items():
        if not isinstance(body, dict) or set(body) != _KEYS or not all(isinstance(x, str) and x for x in body.values()):
            raise GlossaryError(f"{path}: {name} must have the texts formula, file and code, and nothing else.")
        out.append(Term(name, body["formula"], body["file"], body["code"]))
    return tuple(out)
