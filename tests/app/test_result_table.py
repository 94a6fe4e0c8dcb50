"""What is said of a run's result and its notices."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.messages import notice_sentences
from app.result_table import format_bytes, format_share, result_html, rows
from app.texts import LANGUAGES, text

SUMMARY: dict[str, Any] = {
    "settings": {"weights": "int4", "dtype": "float32", "device": "cpu"},
    "backend": "<i>sdpa</i>",
    "kv": {
        "total_bytes": 5962740,
        "peak_persistent_bytes": 5954160,
        "full_kv_bytes": 26173440,
        "share": 0.2275,
        "kv_dtype": "float16",
        "prefill_peak_bytes": 50888880,
        "scoring_bytes": 0,
    },
    "metrics": {
        "fmm": 0.115,
        "fmm_history": 0.45,
        "fmm_fp_only": 0.23,
        "churn": 0.0045,
        "mass_share": {"full": 0.1, "quant": 0.2, "evicted": 0.3},
    },
    "routing": {"events": 6, "promotions": 1, "demotions": 2, "evictions": 3},
    "timing": {"prompt_tokens": 12, "ttft_ms": 8760.0, "tpot_ms": 149.0, "tokens_per_s": 6.7, "reference_share": 0.06},
}


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_result_names_its_dtype_and_escapes(lang: str) -> None:
    html = result_html(SUMMARY, lang)
    assert html.count("MB (float16)") == 3
    assert "int4" in html
    assert "6.0 %" in html
    assert "&lt;i&gt;sdpa&lt;/i&gt;" in html
    assert "<i>" not in html
    assert text(lang, "result.fmm") in html
    assert "5.95 MB" in html
    assert "{" not in html


def test_without_a_reference_nothing_is_made_up() -> None:
    html = result_html(SUMMARY | {"metrics": None}, "en")
    assert text("en", "result.reference_off") in html
    assert text("en", "result.churn") not in html
    assert text("en", "result.reference_none_how") in html


@pytest.mark.parametrize("lang", LANGUAGES)
def test_every_figure_says_where_it_comes_from(lang: str) -> None:
    origins = {"en": ("measured", "set:", "computed"), "zh": ("实测", "设定", "计算")}[lang]
    for summary in (SUMMARY, SUMMARY | {"metrics": None}):
        for name, value, how in rows(summary, lang):
            assert how.startswith(origins) or how == text(lang, "result.reference_off"), name
            assert value


@pytest.mark.parametrize("lang", LANGUAGES)
def test_notices_are_sentences_in_the_readers_language(lang: str) -> None:
    said = notice_sentences(["no_full_history", "new_tokens_capped", "already a sentence."], lang)
    assert said == [
        text(lang, "notice.no_full_history"),
        text(lang, "notice.new_tokens_capped"),
        "already a sentence.",
    ]


@pytest.mark.parametrize("summary", [{}, {"kv": None}, {"kv": {"share": None}, "metrics": {"churn": None}}])
def test_an_incomplete_summary_breaks_nothing(summary: dict[str, Any]) -> None:
    assert "None" not in result_html(summary, "en")


@given(st.integers(0, 10**14))
def test_bytes_have_at_most_three_digits_and_a_unit(count: int) -> None:
    number, unit = format_bytes(count, "en").split(" ")
    size = float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    assert abs(size - count) <= max(1.0, 0.006 * count)
    assert unit == "GB" or float(number) < 1000


def test_small_shares_keep_a_digit() -> None:
    assert format_share(0.2) == "20.0 %"
    assert format_share(0.0042) == "0.42 %"
