"""Figures of a lesson: each read from a trace, from the article's numbers in the lesson, or from this project's own
measurements. Keeps value and unit; the words around them are the texts'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from app.lesson_trace import LessonTrace, Place
from app.result_table import format_bytes, format_share
from app.settings import ASSETS
from app.texts import text
from engine.trace import RoutingEvent, Tier
from presets.lessons import Lesson

BITS = {"float16": 16, "bfloat16": 16, "float32": 32}
"""Bits of a number, by the type that keys and values are stored in."""
MEASURED = ASSETS / "measured.json"
MEASURED_RATIOS = ("decode_ratio_2048", "decode_ratio_6000", "attention_ratio_8192", "prefill_ratio_2048")
"""Ratios QEvict over FullKV of the same machine, same backend: above 1 is slower."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A figure with its unit; `value` None is not measured."""

    value: float | str | None
    unit: str

    def say(self, lang: str) -> str:
        """The figure as it stands on screen."""
        if self.value is None:
            return text(lang, "result.not_measured")
        if isinstance(self.value, str):
            return self.value
        return _SAY[self.unit](self.value, lang)


_SAY = {
    "count": lambda value, lang: f"{value:,.0f}",
    "exact": lambda value, lang: f"{value:,.0f} B",
    "bytes": lambda value, lang: format_bytes(value, lang),
    "share": lambda value, lang: format_share(value),
    "plain": lambda value, lang: f"{value:.4f}",
    # Of the article: as it prints them.
    "setting": lambda value, lang: f"{value:g}",
    "percent": lambda value, lang: f"{value:.4g} %",
    "ms": lambda value, lang: f"{value:.5g} {text(lang, 'unit.ms')}",
    "rate": lambda value, lang: f"{value:.5g}",
    "gigabytes": lambda value, lang: f"{value:.4g} GB",
    "times": lambda value, lang: f"{value:.2f} ×",
}

Facts = dict[str, Fact]


def trace_facts(trace: LessonTrace) -> Facts:
    """What is the same at every place of a trace: sizes, capacities, and the run's means."""
    meta = trace.meta
    metadata = meta.quant_window_bytes - meta.quant_code_bytes
    codes_of_16 = meta.full_window_bytes * meta.bits / 16
    first, last = trace.positions[0].memory, trace.positions[-1].memory
    out = {
        "model": Fact(meta.model, "text"),
        "layers": Fact(meta.num_layers, "count"),
        "omega": Fact(meta.window_size, "count"),
        "sink": Fact(meta.sink_tokens, "count"),
        "local": Fact(meta.local_tokens, "count"),
        "bits": Fact(meta.bits, "count"),
        "q_set": Fact(meta.quant_share, "setting"),
        "full_bits": Fact(BITS[meta.kv_dtype], "count"),
        "kv_budget": Fact(meta.kv_budget, "share"),
        "prompt_tokens": Fact(meta.prompt_tokens, "count"),
        "new_tokens": Fact(trace.positions[-1].seq_len - meta.prompt_tokens, "count"),
        "full_capacity": Fact(meta.full_capacity, "count"),
        "quant_capacity": Fact(meta.quant_capacity, "count"),
        "both_capacity": Fact(meta.full_capacity + meta.quant_capacity, "count"),
        "full_window": Fact(meta.full_window_bytes, "exact"),
        "quant_window": Fact(meta.quant_window_bytes, "exact"),
        "code_bytes": Fact(meta.quant_code_bytes, "exact"),
        "metadata_bytes": Fact(metadata, "exact"),
        "nominal_window": Fact(codes_of_16, "exact"),
        "half_window": Fact(meta.full_window_bytes / 2, "exact"),
        "window_ratio": Fact(meta.quant_window_bytes / meta.full_window_bytes, "share"),
        "nominal_ratio": Fact(meta.bits / 16, "share"),
        "metadata_share": Fact(metadata / meta.quant_window_bytes, "share"),
        "budget": Fact(last.budget, "bytes"),
        "full_kv_start": Fact(first.full_kv, "bytes"),
        "full_kv_end": Fact(last.full_kv, "bytes"),
        "used_start": Fact(first.persistent, "bytes"),
        "used_end": Fact(last.persistent, "bytes"),
        "events": Fact(len(trace.positions), "count"),
        "promotions": Fact(sum(e.promotions for e in trace.positions if isinstance(e, RoutingEvent)), "count"),
        "evictions": Fact(sum(e.evictions for e in trace.positions if isinstance(e, RoutingEvent)), "count"),
    }
    metrics = trace.end.summary.get("metrics") or {}
    for name, key in (("fmm", "fmm"), ("fmm_fp", "fmm_fp_only")):
        out[name] = Fact(metrics.get(key), "share")
    out["churn"] = Fact(metrics.get("churn"), "plain")
    for name, share in (metrics.get("mass_share") or {}).items():
        out[f"mass_{name}"] = Fact(share, "share")
    if out["fmm"].value is not None and out["fmm_fp"].value is not None:
        out["rescued"] = Fact(float(out["fmm_fp"].value) - float(out["fmm"].value), "share")
    return out


def place_facts(trace: LessonTrace, place: Place) -> Facts:
    """What holds at one place: the board's counts, the bytes then, and what is known of the first window."""
    event, row = place.event, place.row
    position = trace.positions[event]
    memory = position.memory
    out = {
        "event": Fact(event, "count"),
        "layer": Fact(row * trace.meta.num_layers // trace.meta.rows, "count"),
        "token": Fact(position.seq_len, "count"),
        "used": Fact(memory.persistent, "bytes"),
        "full_kv": Fact(memory.full_kv, "bytes"),
        "used_share": Fact(memory.persistent / memory.full_kv, "share"),
        "used_times": Fact(memory.full_kv / memory.persistent, "times"),
        "codes": Fact(memory.codes, "bytes"),
        "metadata": Fact(memory.metadata, "bytes"),
        "shadow": Fact(memory.shadow, "bytes"),
    }
    for tier in (Tier.LOCAL, Tier.FULL, Tier.QUANT, Tier.EVICTED):
        out[f"n_{tier.name.lower()}"] = Fact(trace.count(event, row, tier), "count")
    if isinstance(position, RoutingEvent):
        for name in ("promotions", "demotions", "evictions", "aged"):
            out[f"now_{name}"] = Fact(getattr(position, name), "count")
    late = trace.late.get(event)
    if late is not None:
        out["fmm_now"] = Fact(late.fmm, "share")
        out["fmm_fp_now"] = Fact(late.fmm_fp_only, "share")
        out["horizon"] = Fact(late.steps, "count")
    if place.windows:
        out |= _window_facts(trace, place, place.windows[0])
    return out


def _window_facts(trace: LessonTrace, place: Place, window: int) -> Facts:
    event, row = place.event, place.row
    first = trace.meta.sink_tokens + window * trace.meta.window_size
    since = trace.quantized_since(event, row, window)
    gone = trace.gone_since(event, row, window)
    return {
        "window": Fact(window, "count"),
        "first_token": Fact(first, "count"),
        "last_token": Fact(first + trace.meta.window_size - 1, "count"),
        "words": Fact(" ".join(trace.text_of(window).split()), "text"),
        "missed": Fact(trace.missed(event, row, window), "share"),
        "quant_since": Fact(since, "count"),
        "quant_events": Fact(event - since, "count"),
        "quant_tokens": Fact(trace.positions[event].seq_len - trace.positions[since].seq_len, "count"),
        "gone_since": Fact(gone, "count"),
    }


def figure_facts(lesson: Lesson) -> Facts:
    """The article's numbers that the lesson holds."""
    return {name: Fact(figure.value, figure.unit) for name, figure in lesson.figures.items()}


@cache
def measured(path: Path = MEASURED) -> Mapping[str, Any]:
    """This project's own measurements; empty where none are installed."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def measured_facts(found: Mapping[str, Any]) -> Facts:
    """Machine, date and the ratios; what is absent is not measured."""
    out = {name: Fact(_number(found.get(name)), "times") for name in MEASURED_RATIOS}
    for name in ("machine", "date"):
        value = found.get(name)
        out[name] = Fact(value if isinstance(value, str) else None, "text")
    return out


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
