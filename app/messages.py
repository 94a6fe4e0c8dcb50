"""Small pieces of HTML that the tabs share: a notice, an error, the status line. Every word is escaped.

Knows neither layout nor where the words come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from app.compare_lines import notice_sentence
from app.result_table import format_ms
from app.run_watch import Standing
from app.texts import text


def notices_html(sentences: Sequence[str]) -> str:
    """Notices as one calm block each; empty without sentences."""
    return "".join(f'<div class="qe-page-message" role="status">{escape(sentence)}</div>' for sentence in sentences)


NOTICES = ("new_tokens_capped", "no_full_history", "cells_by_majority")
"""The engine's notices on a run; those on a system are worded with it, and a sentence of the app's own is shown as
it is."""


def notice_sentences(notices: Sequence[str], lang: str) -> list[str]:
    """A run's notices as sentences."""
    return [
        text(lang, f"notice.{notice}") if notice in NOTICES else notice_sentence(notice, lang) for notice in notices
    ]


def error_html(sentence: str) -> str:
    """An error as a block that a screen reader announces at once."""
    return f'<div class="qe-page-message qe-bad" role="alert">{escape(sentence)}</div>'


def status_html(sentence: str) -> str:
    """The status line, announced politely."""
    return f'<p class="qe-page-status" role="status" aria-live="polite">{escape(sentence)}</p>'


def hint_html(sentence: str) -> str:
    """A small explanation under a field."""
    return f'<div class="qe-hint">{escape(sentence)}</div>'


STAGES = {
    "load": "status.stage_load",
    "convert": "model.stage_convert",
    "download": "model.stage_download",
    "prefill": "status.stage_prefill",
    "reference": "status.stage_reference",
}
ENDS = {
    "eos": "status.ended_eos",
    "length": "status.ended_length",
    "stop": "status.ended_stop",
    "interrupted": "status.ended_interrupted",
    "error": "status.ended_error",
}


EARLY_ENDS = {"stop": "status.early_stop", "interrupted": "status.early_stop", "error": "status.early_error"}
"""What is said instead where no token had been generated."""


def standing_sentence(now: Standing, lang: str, *, stopping: bool = False) -> str:
    """One sentence on where a run stands; of a document that was asked about, one more at the end."""
    if now.state == "ended":
        if not now.tokens and now.why in EARLY_ENDS:
            return text(lang, EARLY_ENDS[now.why])
        ended = text(lang, ENDS.get(now.why, "status.ended_interrupted"))
        more = document_sentence(now.summary, lang)
        return f"{ended} {more}" if more and not ended.endswith("\u3002") else ended + more
    if stopping:
        return text(lang, "status.stopping")
    if now.state == "queued":
        return _queued(now, lang) if now.ahead else text(lang, "status.starting")
    if now.stage in STAGES and now.done < now.total and (now.state == "loading" or not now.tokens):
        stage = text(lang, STAGES[now.stage])
        return text(lang, "status.progress", stage=stage, done=_count(now.done), total=_count(now.total))
    if now.state == "loading":
        return text(lang, "status.stage_load")
    if not now.planned:
        return text(lang, "status.starting")
    if not now.tokens:
        return text(lang, "status.stage_prefill")
    if now.rate is None:
        return text(lang, "status.running_no_rate", tokens=now.tokens, planned=now.planned)
    return text(lang, "status.running", tokens=now.tokens, planned=now.planned, rate=f"{now.rate:.1f}")


def _queued(now: Standing, lang: str) -> str:
    """Who comes before, and how long that will take where it is known."""
    wait = now.wait_seconds
    if wait is None:
        return text(lang, "status.queued", position=now.ahead)
    if wait < 60:
        # Steps of five seconds: the line is read aloud whenever it changes.
        return text(lang, "status.queued_seconds", position=now.ahead, seconds=max(5, 5 * round(wait / 5)))
    return text(lang, "status.queued_minutes", position=now.ahead, minutes=max(1, round(wait / 60)))


def _count(number: int) -> str:
    """A count with thin spaces between thousands, the same in both languages."""
    return f"{number:,}".replace(",", "\u2009")


def document_sentence(summary: Mapping[str, Any], lang: str) -> str:
    """Whether a run's document was read or kept from before, and the time to the first token; empty without one."""
    timing = summary.get("timing")
    if not isinstance(timing, Mapping) or not timing.get("document_tokens") or not timing.get("ttft_ms"):
        return ""
    settings = summary.get("settings")
    measured = isinstance(settings, Mapping) and settings.get("run_reference")
    how = "used" if timing.get("prefix_used") else "reference" if measured else "read"
    tokens, time = _count(timing["document_tokens"]), format_ms(timing["ttft_ms"], lang)
    return text(lang, f"status.document_{how}", tokens=tokens, time=time)
