"""The Live page's form and its documents, without a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.documents import DEFAULT_DOCUMENT, DocumentError, get_document, load_documents
from app.forms import FILE_LIMIT_KB, OWN_FILE, OWN_TEXT, FormError
from app.tabs.run_panel import PRESET_FIELDS, fill_preset
from app.texts import LANGUAGES, text
from engine.errors import ConfigError
from presets.loader import load_presets
from tests.app.filled_form import filled_form


def test_a_plain_form_is_a_request() -> None:
    request = filled_form().request()
    assert request.prompt == get_document(DEFAULT_DOCUMENT).text
    assert request.config == load_presets()["paper-20"].config.replace(planned_new_tokens=64)
    assert filled_form().options()["max_new_tokens"] == 64
    assert request.raise_budget


def test_fields_are_laid_over_the_preset() -> None:
    config = filled_form(kv_budget=0.4, quant_share=0.1, bits=4, local_tokens="64", promotion=False).config()
    assert (config.kv_budget, config.quant_share, config.bits) == (0.4, 0.1, 4)
    assert (config.local_tokens, config.promotion) == (64, False)
    assert config.kv_dtype == load_presets()["paper-20"].config.kv_dtype


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"document": OWN_TEXT, "own_text": "  \n"}, "error.prompt_empty"),
        ({"document": OWN_FILE}, "error.file_missing"),
        ({"model": " "}, "model.empty"),
    ],
)
def test_what_is_missing_is_said_in_the_readers_language(lang: str, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(FormError) as caught:
        filled_form(lang, **changes).request()
    assert str(caught.value) == text(lang, key)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kv_budget": 0}, "kv_budget"),
        ({"kv_budget": 1.5}, "kv_budget"),
        ({"quant_share": -0.1}, "quant_share"),
        ({"new_tokens": 513}, "new_tokens"),
        ({"new_tokens": None}, "new_tokens"),
        ({"new_tokens": 2.5}, "new_tokens"),
        ({"seed": "seven"}, "seed"),
        ({"temperature": float("nan")}, "temperature"),
        ({"local_tokens": "12"}, "local_tokens"),
        ({"window_size": 7}, "window_size"),
        ({"bits": 3}, "bits"),
    ],
)
def test_a_bad_number_names_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(FormError) as caught:
        filled_form(**changes).request()
    assert text("en", f"form.{field}") in str(caught.value)
    assert "{" not in str(caught.value)


def test_the_engine_refuses_what_does_not_go_together() -> None:
    with pytest.raises(ConfigError):
        filled_form(window_size=1, quant_share=0.7).request()


@given(budget=st.floats(0.001, 1.0), share=st.floats(0.0, 1.0))
def test_every_share_in_range_is_taken(budget: float, share: float) -> None:
    config = filled_form(kv_budget=budget, quant_share=share).config()
    assert (config.kv_budget, config.quant_share) == (budget, share)


def test_files_are_read_with_their_limits(tmp_path: Path) -> None:
    good, large, binary = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "c.txt"
    good.write_bytes(b"\xef\xbb\xbfhello \xe4\xbd\xa0")
    large.write_text("x" * (FILE_LIMIT_KB * 1024 + 1))
    binary.write_bytes(b"\xff\xfe\x00\x01")
    assert filled_form(document=OWN_FILE, file=str(good)).prompt() == ("hello \u4f60", "a.txt")
    with pytest.raises(FormError, match=str(FILE_LIMIT_KB)):
        filled_form(document=OWN_FILE, file=str(large)).prompt()
    with pytest.raises(FormError, match="UTF-8"):
        filled_form(document=OWN_FILE, file=str(binary)).prompt()


def test_every_preset_fills_the_form_and_comes_back() -> None:
    for name, preset in load_presets().items():
        filled = dict(zip(PRESET_FIELDS, fill_preset(name), strict=True))
        config = filled_form(preset=name, **filled).config()
        assert config == preset.config.replace(planned_new_tokens=64, routing_interval=None), name


# documents


def test_documents_state_a_fact_and_end_with_a_question() -> None:
    documents = load_documents()
    assert DEFAULT_DOCUMENT in documents
    english = [document for document in documents.values() if document.language == "en"]
    assert [document.tokens for document in english] == sorted(document.tokens for document in english)
    for document in documents.values():
        last = document.text.splitlines()[-1]
        assert last.startswith("Question:" if document.language == "en" else "\u95ee\u9898")
        assert document.tokens / 3 < len(document.text) < document.tokens * 5
        assert all(document.title(lang) and document.hint(lang) for lang in LANGUAGES)


def test_an_unknown_document_is_refused() -> None:
    with pytest.raises(DocumentError, match="nothing"):
        get_document("nothing")
