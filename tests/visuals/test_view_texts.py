"""The board's words: the scripts use keys that exist, and every language has them with the same places."""

from __future__ import annotations

import re
import tomllib

import pytest

from visuals.replay import ASSETS, LATE_SCRIPTS, NOTES_SCRIPT, SCRIPTS

WORDS = dict(re.findall(r'^\s+"view\.(\w+)": "(.*)",$', (ASSETS / "js" / "tier_texts.js").read_text("utf-8"), re.M))


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_language_has_every_word(lang: str) -> None:
    words = tomllib.loads((ASSETS / "texts" / f"{lang}.toml").read_text("utf-8"))["view"]
    assert set(words) == set(WORDS)
    for key, english in WORDS.items():
        places = set(re.findall(r"{\w+}", english))
        assert set(re.findall(r"{\w+}", words[key])) <= places, key
        assert words[key].strip(), key


def test_scripts_use_words_that_exist() -> None:
    used: set[str] = set()
    families: set[str] = set()
    for name in (*SCRIPTS[1:], *LATE_SCRIPTS, NOTES_SCRIPT, "tier_follow.js"):
        source = (ASSETS / "js" / name).read_text("utf-8")
        used |= set(re.findall(r'"view\.(\w+)"', source))
        families |= set(re.findall(r"`view\.(\w+_)\$", source))
    assert used - set(WORDS) == set()
    for family in families:
        assert any(key.startswith(family) for key in WORDS), family
