"""A comparison's figures for a person and for a program: one row per system, and how each figure was measured.

Knows the engine's result and the texts; knows neither page nor command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from app.texts import all_texts, text

if TYPE_CHECKING:
    from engine.compare import CompareResult, SystemResult

FIGURES = ("bytes", "share", "fmm", "churn", "kl", "agreement", "output_error", "perplexity", "ms_per_token")
"""Figures of a system in the order in which they are shown; texts "compare.bytes" and "compare.bytes_how" name them."""

NOTICES = ("window_shrunk", "sinks_quantized", "bytes_nominal", "oracle", "fp_only", "same_set")
"""Notices of systems of a comparison; the others are those of a run."""


def system_label(name: str, lang: str) -> str:
    """The name of a system for a reader; one that has no text keeps its own."""
    return all_texts(lang).get(_key(name), name)


def system_line(name: str, lang: str) -> str:
    """What a system does, in one line; empty where there is no text."""
    return all_texts(lang).get(f"{_key(name)}_line", "")


def system_loss(name: str, lang: str) -> str:
    """What is lost under a system; empty where there is no text."""
    return all_texts(lang).get(f"{_key(name)}_loss", "")


def _key(name: str) -> str:
    return f"systems.{name.replace('-', '_')}"


def keeps_label(keeps: str, lang: str) -> str:
    """ "exact", "lossy" or "recoverable" for a reader."""
    return all_texts(lang).get(f"compare.keeps_{keeps}", keeps)


def notice_sentence(notice: str, lang: str) -> str:
    """One of a system's notices as a sentence; an unknown one as it is."""
    key = f"compare.notice_{notice}" if notice in NOTICES else f"notice.{notice}"
    return all_texts(lang).get(key, notice)


def value_of(system: SystemResult, figure: str) -> float | None:
    """One figure of a system, None where it was not measured."""
    value: float | None = mean_error(system) if figure == "output_error" else getattr(system, figure)
    return value


def mean_error(system: SystemResult) -> float | None:
    """Error of attention outputs, mean over layers."""
    errors = system.output_error
    return sum(errors) / len(errors) if errors else None


def shown(figure: str, value: float | None) -> str:
    """A figure with its unit; a dash where it was not measured."""
    if value is None:
        return "–"
    if figure == "bytes":
        return f"{value / 1e6:.2f} MB"
    if figure in ("share", "fmm", "agreement"):
        return f"{value:.1%}" if value >= 0.01 or value == 0 else f"{value:.2%}"
    if figure == "ms_per_token":
        return f"{value:.1f} ms"
    return f"{value:.2f}" if figure == "perplexity" else f"{value:.4f}"


def figures_shown(result: CompareResult) -> list[str]:
    """The figures that this comparison measured for at least one system."""
    return [name for name in FIGURES if any(value_of(system, name) is not None for system in result.systems)]


def how(figure: str, result: CompareResult, lang: str) -> str:
    """How a figure was measured in this comparison."""
    return text(lang, f"compare.{figure}_how", dtype=result.kv_dtype, steps=max(0, len(result.token_ids) - 1))


def report(result: CompareResult, setup: Mapping[str, Any]) -> dict[str, Any]:
    """Everything as plain values, ready for JSON; `measured` says how each figure was obtained."""
    body = result.to_dict()
    for system, values in zip(result.systems, body["systems"], strict=True):
        values["mean_output_error"] = mean_error(system)
        values["label"] = system_label(system.name, "en")
        values["line"] = system_line(system.name, "en")
        values["loss"] = system_loss(system.name, "en")
        values["simulated"] = system.storage != "real"
        values["notices"] = [notice_sentence(notice, "en") for notice in system.notices]
    return {**setup, **body, "measured": {name: how(name, result, "en") for name in FIGURES}}


def lines(result: CompareResult) -> list[str]:
    """The comparison for a terminal."""
    names = figures_shown(result)
    head = ["system", "keeps", *(text("en", f"compare.{name}") for name in names)]
    rows = [
        [
            system_label(system.name, "en") + (" [simulated]" if system.storage != "real" else ""),
            system.keeps,
            *(shown(name, value_of(system, name)) for name in names),
        ]
        for system in result.systems
    ]
    out = [
        f"{result.prompt_tokens:,} + {len(result.token_ids):,} tokens, {text('en', f'compare.mode_{result.mode}')}; "
        f"FullKV would hold {result.full_kv_bytes / 1e6:.2f} MB in {result.kv_dtype} and took "
        f"{result.reference_ms_per_token:.1f} ms per token here, with recording",
        "",
        *_columns([head, *rows]),
        "",
        "How each figure was measured",
        *(f"  {text('en', f'compare.{name}')}: {how(name, result, 'en')}" for name in names),
    ]
    lost = [(system.name, system_loss(system.name, "en")) for system in result.systems]
    out += ["", "What is lost", *(f"  {system_label(name, 'en')}: {words}" for name, words in lost if words)]
    out += [
        f"  {system_label(system.name, 'en')}: {notice_sentence(notice, 'en')}"
        for system in result.systems
        for notice in system.notices
    ]
    if result.mode == "free":
        out += ["", f"FullKV: {result.text}"]
        for system in result.systems:
            at = system.first_difference
            where = "the same tokens" if at is None else f"first difference at new token {at + 1}"
            out += ["", f"{system_label(system.name, 'en')} ({where}): {system.text}"]
    return out


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
