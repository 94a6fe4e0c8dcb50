"""The result table of a run: its summary's figures, each with its unit and how it was obtained.

Knows the shape of `EndEvent.summary` and the texts; knows neither server nor session store.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from app.glossary import term_html
from app.texts import text

Row = tuple[str, str, str]

TERMS = {
    "kv_bytes": "persistent",
    "kv_total": "budget",
    "full_kv": "kv_cache",
    "share": "share",
    "prefill_peak": "workspace",
    "scoring": "workspace",
    "fmm": "fmm",
    "fmm_history": "fmm",
    "fmm_fp_only": "fmm_fp",
    "mass": "mass_share",
    "churn": "churn",
    "ttft": "ttft",
    "tpot": "tpot",
    "routing": "routing",
    "backend": "backend",
    "reference": "reference",
}
"""The glossary's term for each figure that has one."""


def format_bytes(count: float, lang: str) -> str:
    """Bytes in decimal units with three digits, such as "5.45 MB": the board's way."""
    size = float(count)
    for key in ("unit.bytes", "unit.kilo", "unit.mega"):
        if size < 999.5:
            return f"{_digits(size)} {text(lang, key)}"
        size /= 1000
    return f"{_digits(size)} {text(lang, 'unit.giga')}"


def format_share(share: float) -> str:
    """A share in [0, 1] as a percentage with one decimal, two below one per cent."""
    return f"{share * 100:.2f} %" if 0 < share < 0.01 else f"{share * 100:.1f} %"


def format_ms(ms: float, lang: str) -> str:
    """Milliseconds, from one second on in seconds."""
    if ms < 1000:
        return f"{_digits(ms)} {text(lang, 'unit.ms')}"
    return f"{_digits(ms / 1000)} {text(lang, 'unit.seconds')}"


def rows(summary: Mapping[str, Any], lang: str) -> list[Row]:
    """(figure, value, how it was obtained) for each figure that the run measured."""

    def say(key: str, **values: object) -> str:
        return text(lang, f"result.{key}", **values)

    out: list[Row] = []
    kv = _table(summary, "kv")
    dtype = str(kv.get("kv_dtype", "?"))
    for name, key in (("peak_persistent_bytes", "kv_bytes"), ("total_bytes", "kv_total"), ("full_kv_bytes", "full_kv")):
        if _number(kv.get(name)):
            out.append((say(key), _held(kv[name], dtype, lang), say(f"{key}_how")))
    if _number(kv.get("share")):
        out.append((say("share"), format_share(kv["share"]), say("share_how")))
    out += _metric_rows(summary, lang)
    out += _timing_rows(summary, lang)
    for name, key in (("prefill_peak_bytes", "prefill_peak"), ("scoring_bytes", "scoring")):
        if _number(kv.get(name)):
            out.append((say(key), format_bytes(kv[name], lang), say(f"{key}_how")))
    if _number(kv.get("kernel_bytes")) and kv["kernel_bytes"]:
        out.append((say("kernel"), format_bytes(kv["kernel_bytes"], lang), say("kernel_how")))
    timing = _table(summary, "timing")
    if timing.get("document_tokens") and _number(kv.get("prefix_bytes")):
        key = "prefix_used" if timing.get("prefix_used") else "prefix_read"
        how = say("prefix_how", bytes=format_bytes(kv["prefix_bytes"], lang))
        out.append((say("prefix"), say(key, tokens=timing["document_tokens"]), how))
    return out


def _held(count: float, dtype: str, lang: str) -> str:
    """Bytes of keys and values: without the type in which they are stored they can't be compared."""
    return f"{format_bytes(count, lang)} ({dtype})"


def _metric_rows(summary: Mapping[str, Any], lang: str) -> list[Row]:
    def say(key: str, **values: object) -> str:
        return text(lang, f"result.{key}", **values)

    out: list[Row] = []
    metrics = _table(summary, "metrics")
    if not metrics:
        out.append((say("fmm"), say("not_measured"), say("reference_off")))
    for name in ("fmm", "fmm_history", "fmm_fp_only"):
        if _number(metrics.get(name)):
            out.append((say(name), format_share(metrics[name]), say(f"{name}_how")))
    mass = metrics.get("mass_share")
    if isinstance(mass, Mapping) and all(_number(mass.get(name)) for name in ("full", "quant", "evicted")):
        value = " / ".join(format_share(mass[name]) for name in ("full", "quant", "evicted"))
        out.append((say("mass"), value, say("mass_how")))
    if _number(metrics.get("churn")):
        out.append((say("churn"), f"{metrics['churn']:.4f}", say("churn_how")))
    return out


def _timing_rows(summary: Mapping[str, Any], lang: str) -> list[Row]:
    def say(key: str, **values: object) -> str:
        return text(lang, f"result.{key}", **values)

    out: list[Row] = []
    timing, routing = _table(summary, "timing"), _table(summary, "routing")
    measured = bool(_table(summary, "metrics"))
    if _number(timing.get("tokens_per_s")):
        how = say("rate_how") if measured else say("rate_how_plain")
        out.append((say("rate"), f"{timing['tokens_per_s']:.1f}", how))
    if _number(timing.get("ttft_ms")):
        how = say("ttft_how", tokens=timing.get("prompt_tokens", "?"))
        if timing.get("prefix_used"):
            how = say("ttft_kept_how", tokens=timing.get("prompt_tokens", "?"), kept=timing.get("document_tokens", "?"))
        out.append((say("ttft"), format_ms(timing["ttft_ms"], lang), how))
    if _number(timing.get("tpot_ms")):
        out.append((say("tpot"), format_ms(timing["tpot_ms"], lang), say("tpot_how")))
    if _number(timing.get("batch_rows")) and timing["batch_rows"] > 1:
        out.append((say("batch"), str(timing["batch_rows"]), say("batch_how")))
    if summary.get("backend"):
        out.append((say("backend"), str(summary["backend"]), say("backend_how")))
    settings = _table(summary, "settings")
    if settings.get("weights"):
        how = say("weights_how", dtype=settings.get("dtype", "?"), device=settings.get("device", "?"))
        out.append((say("weights"), str(settings["weights"]), how))
    if measured and _number(timing.get("reference_share")):
        out.append((say("reference"), format_share(timing["reference_share"]), say("reference_how")))
    elif timing:
        out.append((say("reference"), say("none"), say("reference_none_how")))
    if _number(routing.get("events")):
        counts = {name: routing.get(name, 0) for name in ("events", "promotions", "demotions", "evictions")}
        out.append((say("routing"), say("routing_value", **counts), say("routing_how")))
    return out


def result_html(summary: Mapping[str, Any], lang: str) -> str:
    """The table as HTML; empty where there is no figure. All cells are escaped."""
    figures = rows(summary, lang)
    if not _table(summary, "kv"):
        return ""
    body = "".join(
        f'<tr><th scope="row">{term_html(_term(name, lang), name)}</th><td class="qe-number">{escape(value)}</td>'
        f"<td>{escape(how)}</td></tr>"
        for name, value, how in figures
    )
    head = "".join(f'<th scope="col">{escape(text(lang, f"result.{key}"))}</th>' for key in ("figure", "value", "how"))
    return (
        f'<section class="qe-doc qe-result"><h2>{escape(text(lang, "result.title"))}</h2>'
        f'<table class="qe-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        f'<p class="qe-page-note">{escape(text(lang, "result.speed_note"))}</p></section>'
    )


def _term(name: str, lang: str) -> str:
    """The glossary's term for a figure of that name, "" where there is none."""
    return next((term for key, term in TERMS.items() if text(lang, f"result.{key}") == name), "")


def _table(summary: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = summary.get(name)
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _digits(value: float) -> str:
    if value >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
