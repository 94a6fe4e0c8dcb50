"""The table under a comparison: one row per system, each figure with its unit and how it was measured; free texts.

Every word is escaped. Knows the outcome and the texts; knows no page.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from app.compare_lines import (
    figures_shown,
    how,
    keeps_label,
    notice_sentence,
    shown,
    system_label,
    system_line,
    system_loss,
    value_of,
)
from app.glossary import term_html
from app.result_table import format_bytes, format_ms
from app.texts import text

if TYPE_CHECKING:
    from app.compare_record import Outcome
    from engine.compare import SystemResult

TERMS = {
    "bytes": "persistent",
    "share": "share",
    "fmm": "fmm",
    "churn": "churn",
    "kl": "kl",
    "agreement": "agreement",
    "perplexity": "perplexity",
    "ms_per_token": "tpot",
}
"""The glossary's term for each figure that has one."""


def comparison_html(outcome: Outcome, lang: str) -> str:
    """Figures of all systems, how each was measured, and in free mode the texts."""
    result = outcome.result
    names = figures_shown(result)
    free = result.mode == "free"
    heads = [text(lang, "compare.system"), *(text(lang, f"compare.{name}") for name in names)]
    heads += [text(lang, "compare.first_difference")] if free else []
    terms = ["", *(TERMS.get(name, "") for name in names), ""]
    head = "".join(f'<th scope="col">{term_html(term, words)}</th>' for term, words in zip(terms, heads, strict=False))
    body = "".join(_row(outcome, system, names, lang) for system in result.systems)
    caption = text(
        lang,
        "compare.table",
        prompt=f"{result.prompt_tokens:,}",
        tokens=f"{len(result.token_ids):,}",
        model=outcome.model,
        full=format_bytes(result.full_kv_bytes, lang),
        dtype=result.kv_dtype,
        ms=format_ms(result.reference_ms_per_token, lang),
    )
    measured = [(text(lang, f"compare.{name}"), how(name, result, lang)) for name in names]
    if free:
        measured.append((text(lang, "compare.first_difference"), text(lang, "compare.first_difference_how")))
    notes = "".join(f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in measured)
    return (
        (texts_html(outcome, lang) if free else "")
        + f'<section class="qe-cmp-result"><p class="qe-page-note">{escape(caption)}</p><div class="qe-scroll">'
        + f'<table class="qe-table qe-cmp-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        + f"<h3>{escape(text(lang, 'compare.how'))}</h3>"
        + f'<dl class="qe-cmp-how">{notes}</dl>'
        + "</section>"
    )


def badges(keeps: str, storage: str, lang: str) -> str:
    """What a system keeps, and whether its storage is simulated, as small labels."""
    kept = f'<span class="qe-badge qe-keeps-{escape(keeps)}">{escape(keeps_label(keeps, lang))}</span>'
    return kept + simulated_badge(storage, lang)


def simulated_badge(storage: str, lang: str) -> str:
    """A badge for simulated storage, nothing for real one."""
    if storage == "real":
        return ""
    hint, words = escape(text(lang, "compare.simulated_hint")), escape(text(lang, "compare.simulated"))
    return f'<span class="qe-badge qe-simulated" title="{hint}">{words}</span>'


def _row(outcome: Outcome, system: SystemResult, names: list[str], lang: str) -> str:
    result = outcome.result
    cells = "".join(
        f'<td class="qe-number">{escape(shown(name, value_of(system, name)))}{_mark(name, system, outcome, lang)}</td>'
        for name in names
    )
    if result.mode == "free":
        at = system.first_difference
        words = text(lang, "compare.first_none") if at is None else text(lang, "compare.first_at", n=at + 1)
        cells += f"<td>{escape(words)}</td>"
    label = system_label(system.name, lang)
    loss = system_loss(system.name, lang)
    lost = text(lang, "compare.lost", what=loss) if loss else ""
    notices = [notice_sentence(notice, lang) for notice in system.notices]
    sentences = [
        system_line(system.name, lang),
        lost,
        " · ".join(words for words in [_budget(system, lang), *notices] if words),
    ]
    said = "".join(f"<p>{escape(words)}</p>" for words in sentences if words)
    return (
        f'<tr><th scope="row"><strong>{escape(label)}</strong>{badges(system.keeps, system.storage, lang)}{said}'
        f"{_match_button(outcome, system, label, lang)}</th>{cells}</tr>"
    )


def _mark(name: str, system: SystemResult, outcome: Outcome, lang: str) -> str:
    """Beside bytes: that storage is simulated, where it is, and what the accountant expected, where that differs."""
    if name not in ("bytes", "share"):
        return ""
    simulated = simulated_badge(system.storage, lang)
    if name == "share":
        return simulated
    if system.bytes == system.expected_bytes or outcome.result.stopped:
        return simulated
    words = text(lang, "compare.accounted_off", bytes=format_bytes(system.expected_bytes, lang))
    return f"{simulated}<small>{escape(words)}</small>"


def _budget(system: SystemResult, lang: str) -> str:
    if system.budget is None:
        return text(lang, "compare.own_point") if system.family == "quantize" else ""
    said = system.budget
    return text(
        lang,
        "compare.budget_said",
        share=shown("share", said["share"]),
        bytes=format_bytes(said["bytes"], lang),
        tokens=f"{said['tokens']:,.0f}",
    )


def _match_button(outcome: Outcome, system: SystemResult, label: str, lang: str) -> str:
    if system.family != "quantize":
        return ""
    tiers = any(other.family == "tiers" for other in outcome.result.systems)
    if not tiers:
        return f"<p>{escape(text(lang, 'compare.no_qevict'))}</p>"
    name, words, named = system.name, text(lang, "compare.match"), text(lang, "compare.match_named", name=label)
    if outcome.request.match_to == system.name:
        name, words, named = "", text(lang, "compare.unmatch"), text(lang, "compare.unmatch")
    return (
        f'<button type="button" class="qe-open" data-act="match" data-name="{escape(name)}" '
        f'aria-label="{escape(named)}">'
        f"{escape(words)}</button>"
    )


def texts_html(outcome: Outcome, lang: str) -> str:
    """FullKV's text and each system's under it; what they share is quiet, the first difference is marked."""
    result = outcome.result
    blocks = [f'<div class="qe-cmp-text"><b>FullKV</b><p dir="auto" tabindex="0">{escape(result.text)}</p></div>']
    for system in result.systems:
        at = system.first_difference
        note = text(lang, "compare.same_text") if at is None else text(lang, "compare.text_from", n=at + 1)
        own, full = system.text or "", result.text
        shared = len(own) if at is None else shared_length(own, full)
        word, after = first_word(own[shared:])
        marked = f"<mark>{escape(word)}</mark>{escape(after)}" if word else ""
        blocks.append(
            f'<div class="qe-cmp-text"><b>{escape(system_label(system.name, lang))}</b>'
            f'<span class="qe-page-note">{escape(note)}</span>'
            f'<p dir="auto" tabindex="0"><span class="qe-cmp-shared">{escape(own[:shared])}</span>'
            f'<span class="qe-cmp-own">{marked}</span></p></div>'
        )
    head = escape(text(lang, "compare.texts"))
    return f'<section class="qe-cmp-texts" aria-label="{head}">{"".join(blocks)}</section>'


def shared_length(own: str, full: str) -> int:
    """Characters that two texts have in common from the beginning; ends at the beginning of a word where it can."""
    at = next((index for index, (a, b) in enumerate(zip(own, full, strict=False)) if a != b), min(len(own), len(full)))
    if at >= len(own):
        return at
    while at > 0 and own[at - 1].isalnum() and own[at - 1].isascii():
        at -= 1
    return at


def first_word(words: str) -> tuple[str, str]:
    """The first word, with what stands before it, and the rest."""
    end = len(words) - len(words.lstrip())
    while end < len(words) and not words[end].isspace():
        end += 1
        if not words[end - 1].isascii():
            break
    return words[:end], words[end:]
