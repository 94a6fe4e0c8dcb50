"""The texts: both languages complete and alike, every key that the code uses there, none that nothing uses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.texts import DEFAULT, LANGUAGES, all_texts, read_texts, text

ROOT = Path(__file__).resolve().parents[2]
PLACEHOLDER = re.compile(r"\{(\w+)\}")
KEY = re.compile(r"""["'`]([a-z]+\.[a-z0-9_]+)["'`]""")
MADE_UP = re.compile(r"""f["']([a-z]+)\.([a-z_]*)\{""")
CJK = re.compile(r"[\u4e00-\u9fff]")
FILE_ENDINGS = {"py", "toml", "js", "css", "txt", "json", "safetensors"}


def _table(lang: str) -> dict[str, str]:
    return read_texts(ROOT / "assets" / "texts" / f"{lang}.toml")


def _sources() -> list[str]:
    files = [*ROOT.glob("app/**/*.py"), *ROOT.glob("visuals/**/*.py"), *ROOT.glob("assets/js/*.js")]
    return [file.read_text(encoding="utf-8") for file in files]


def _areas() -> set[str]:
    return {key.split(".")[0] for key in _table(DEFAULT)}


def test_both_languages_have_the_same_keys() -> None:
    english, chinese = _table("en"), _table("zh")
    assert set(english) == set(chinese)
    assert len(english) > 200


def test_placeholders_match() -> None:
    english, chinese = _table("en"), _table("zh")
    different = {
        key for key in english if sorted(PLACEHOLDER.findall(english[key])) != sorted(PLACEHOLDER.findall(chinese[key]))
    }
    assert different == set()


def test_braces_are_placeholders_only() -> None:
    for lang in LANGUAGES:
        for key, words in _table(lang).items():
            assert "{" not in PLACEHOLDER.sub("", words), f"{lang}: {key}"
            assert "}" not in PLACEHOLDER.sub("", words), f"{lang}: {key}"


def test_no_text_is_empty_or_padded() -> None:
    for lang in LANGUAGES:
        bad = [key for key, words in _table(lang).items() if not words or words != words.strip()]
        assert bad == [], lang


def test_chinese_uses_its_own_punctuation() -> None:
    half = re.compile(r"[\u4e00-\u9fff][,:;?!]|[,;?!][\u4e00-\u9fff]")
    bad = {key: words for key, words in _table("zh").items() if half.search(words)}
    assert bad == {}


def test_chinese_sentences_are_chinese() -> None:
    untranslated = [
        key
        for key, words in _table("zh").items()
        if words == _table("en")[key] and len(words.split()) > 2 and not CJK.search(words)
    ]
    assert untranslated == []


def test_every_key_that_the_code_names_exists() -> None:
    areas, known = _areas(), set(_table(DEFAULT))
    used = {key for source in _sources() for key in KEY.findall(source)}
    missing = {key for key in used if key.split(".")[0] in areas and key not in known}
    missing -= {key for key in missing if key.rsplit(".", 1)[1] in FILE_ENDINGS}
    assert missing == set()


def test_every_text_is_used() -> None:
    sources = _sources()
    used = {key for source in sources for key in KEY.findall(source)}
    prefixes = {f"{area}.{name}" for source in sources for area, name in MADE_UP.findall(source)}
    # The pages' own shorthands: say("title") in about.py and result_table.py, _field("bits"), _error("not_whole").
    words = {word for source in sources for word in re.findall(r"""["'`]([a-z0-9_]+)["'`]""", source)}

    def reached(key: str) -> bool:
        name = key.split(".", 1)[1]
        made = any(key.startswith(prefix) for prefix in prefixes)
        parts = [name, *(name.removesuffix(end) for end in ("_how", "_sub", "_info"))]
        parts += [name.split("_", 1)[1]] if "_" in name else []
        parts += [part.removesuffix("_sub") for part in parts]
        return key in used or (made and any(part in words for part in parts))

    # Words of the board, of systems and of tasks are asked for by scripts and by the engine's names.
    elsewhere = ("view.", "systems.", "tasks.")
    assert [key for key in _table(DEFAULT) if not key.startswith(elsewhere) and not reached(key)] == []


@pytest.mark.parametrize("lang", LANGUAGES)
def test_values_are_put_in(lang: str) -> None:
    said = text(lang, "status.running", tokens=3, planned=9, rate="1.5")
    assert all(part in said for part in ("3", "9", "1.5"))
    assert "{" not in said


def test_a_language_that_we_lack_is_english() -> None:
    assert all_texts("fr") == all_texts("en")
