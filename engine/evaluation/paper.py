"""Every figure that the article publishes, as data, with its table: the "paper" side of each comparison.

arXiv:2608.05326v1, QEvict, 5 August 2026. FMM, shares, LIR and scores in per cent; churn and cosines in [0, 1];
times in ms. `derived` figures follow from others in the text; `approximate` ones are read from it as rounded. Later
figures that its authors have published elsewhere stand apart in `FOLLOW_UP`. Nothing here was measured by us.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

ARTICLE: Final = "arXiv:2608.05326v1"
MODELS: Final = ("Llama-3.1-8B-Instruct", "Mistral-7B-Instruct-v0.2", "Qwen2.5-7B-Instruct")
SETUP: Final[dict[str, Any]] = {
    "models": MODELS,
    "sink_tokens": 5,
    "window_size": 8,
    "quant_share": 0.70,
    "bits": 2,
    "budgets": (0.05, 0.10, 0.20),
    "recent_share_gsm8k": 0.25,
    "hardware": "8 x A100 80 GB; some runs 1 x GB10 128 GB",
    "software": "torch 2.6.0, CUDA 12.4, transformers 4.47.1, flash-attn 2.8.3",
}


@dataclass(frozen=True, slots=True)
class Published:
    """One published figure.

    Attributes:
        table: "Table 14", "Figure 1", …. system, quantity: what it is of. value: as printed.
        unit: "%", "" (a share or a cosine), "ms", "tok/s", "GB", "events", "count", "points".
        model: which of the article's models; "" where the article does not say.
        condition: budget or setting. how: "printed", "derived" or "approximate".
    """

    table: str
    system: str
    quantity: str
    value: float
    unit: str = "%"
    model: str = ""
    condition: str = ""
    how: str = "printed"


_L, _M, _Q = "Llama-3.1-8B", "Mistral-7B", "Qwen2.5-7B"


def _rows(table: str, unit: str, model: str, condition: str, *figures: tuple[str, str, float]) -> tuple[Published, ...]:
    return tuple(Published(table, system, name, value, unit, model, condition) for system, name, value in figures)


def _scores(table: str, condition: str, system: str, **scores: float) -> tuple[Published, ...]:
    """Task scores of one setting of the ablations: Llama, 5 %."""
    return tuple(Published(table, system, name, value, "%", _L, condition) for name, value in scores.items())


PUBLISHED: Final[tuple[Published, ...]] = (
    *_rows(
        "Figure 1",
        "%",
        "",
        "attention mass",
        ("R2", "full", 33.3),
        ("R2", "evicted", 64.8),
        ("R3", "full", 19.7),
        ("R3", "quant", 42.6),
        ("R3", "evicted", 35.7),
    ),
    *_rows(
        "Table 2",
        "%",
        _L,
        "RULER 32k, 20 %",
        ("QEvict", "average", 87.6),
        ("QEvict", "niah_multikey_3", 77.8),
        ("DefensiveKV", "niah_multikey_3", 97.0),
        ("Layer-DefensiveKV", "niah_multikey_3", 99.0),
        ("QEvict", "cwe", 43.98),
        ("FullKV", "cwe", 45.22),
        ("Layer-DefensiveKV", "cwe", 17.86),
        ("QEvict", "qa_1", 84.60),
    ),
    Published("Table 2", "Layer-DefensiveKV", "average", 86.4, "%", _L, "RULER 32k, 20 %", "derived"),
    Published("Table 2", "FullKV", "average", 90.0, "%", _L, "RULER 32k, 20 %", "approximate"),
    Published("Table 2", "best quantizer near 20 %", "average", 79.0, "%", _L, "RULER 32k, 20 %", "approximate"),
    Published("Table 3", "QEvict", "macro average", 46.4, "%", _L, "LongBench, 20 %"),
    Published("Table 3", "QEvict", "macro average", 37.8, "%", _M, "LongBench, 20 %"),
    Published("Table 3", "best eviction", "macro average", 44.0, "%", _L, "LongBench, 20 %"),
    Published("Table 3", "best eviction", "macro average", 37.4, "%", _M, "LongBench, 20 %"),
    Published("Table 3", "QEvict", "lead over best eviction", 9.7, "points", _L, "LongBench, 5 %"),
    Published("Table 3", "QEvict", "lead over best eviction", 4.7, "points", _M, "LongBench, 5 %"),
    *_rows(
        "Table 3",
        "%",
        _L,
        "LongBench, 5 %",
        ("QEvict", "hotpotqa", 56.4),
        ("Layer-DefensiveKV", "hotpotqa", 40.9),
        ("QEvict", "musique", 32.5),
        ("Layer-DefensiveKV", "musique", 17.8),
        ("QEvict", "triviaqa", 89.6),
        ("several eviction systems", "triviaqa", 93.0),
    ),
    *(
        Published("Figure 3", system, "GSM8K exact match", value, "%", model, condition)
        for system, condition, values in (
            ("QEvict", "20 %", {_L: 79.09, _M: 40.12, _Q: 79.42}),
            ("Layer-DefensiveKV", "20 %", {_L: 31.16, _M: 20.09, _Q: 3.71}),
            ("KIVI", "near 20 %", {_L: 79.98, _M: 40.94, _Q: 84.61}),
            ("ZipCache", "near 20 %", {_L: 84.46, _Q: 89.99}),
            ("QEvict", "40 %", {_L: 85.44, _Q: 80.51}),
            ("FullKV", "100 %", {_L: 86.93, _Q: 90.78}),
        )
        for model, value in values.items()
    ),
    *(
        Published("Table 4", system, quantity, value, unit, _L, f"{backend}, prompt 256, new 1024, batch 32")
        for backend, system, quantity, value, unit in (
            ("sdpa", "FullKV", "ttft", 689.3, "ms"),
            ("sdpa", "FullKV", "tpot", 84.05, "ms"),
            ("sdpa", "FullKV", "throughput", 379.26, "tok/s"),
            ("sdpa", "QEvict", "ttft", 692.4, "ms"),
            ("sdpa", "QEvict", "tpot", 76.26, "ms"),
            ("sdpa", "QEvict", "throughput", 416.44, "tok/s"),
            ("fa2", "FullKV", "peak", 29.54, "GB"),
            ("fa2", "FullKV", "tpot", 59.74, "ms"),
            ("fa2", "FullKV", "throughput", 535.11, "tok/s"),
            ("fa2", "QEvict", "peak", 20.78, "GB"),
            ("fa2", "QEvict", "ttft", 772.0, "ms"),
            ("fa2", "QEvict", "tpot", 146.35, "ms"),
            ("fa2", "QEvict", "throughput", 218.05, "tok/s"),
        )
    ),
    *_scores("Table 11", "window 4", "QEvict", average=42.81, narrativeqa=28.17, musique=30.05),
    *_scores("Table 11", "window 8", "QEvict", average=43.33, narrativeqa=27.30, musique=32.50, qmsum=23.90),
    *_scores("Table 11", "window 8", "QEvict", triviaqa=89.60),
    *_scores("Table 11", "window 16", "QEvict", average=42.89),
    *_scores("Table 11", "window 32", "QEvict", average=42.32, triviaqa=87.67),
    *_scores("Table 12", "q 0.10", "QEvict", average=41.87),
    *_scores("Table 12", "q 0.70", "QEvict", average=43.33, narrativeqa=27.30, musique=32.50, triviaqa=89.60),
    *_scores("Table 12", "q 0.90", "QEvict", average=43.28, narrativeqa=27.02, musique=32.58, triviaqa=89.66),
    *_scores("Table 13", "INT2", "QEvict", average=43.33, narrativeqa=27.30, musique=32.50, triviaqa=89.60),
    *_scores("Table 13", "INT4", "QEvict", average=42.67, narrativeqa=27.75, musique=30.09, triviaqa=88.94),
    *_rows("Table 14", "%", "", "", ("R1", "fmm", 51.73), ("R3", "fmm", 46.38), ("R4", "fmm", 47.38)),
    *_rows("Table 14", "%", "", "", ("R3 FP-tier-only", "fmm", 60.19)),
    *_rows("Table 14", "", "", "", ("R1", "churn", 0.0170), ("R3", "churn", 0.0012), ("R4", "churn", 0.0180)),
    *_rows(
        "Table 15",
        "",
        "",
        "cumulative scores",
        ("R3", "qsa_mean", 0.9824),
        ("R3", "qsa_first_event", 1.0),
        ("R3", "qsa_last_event", 0.9676),
        ("R3", "qsa_layer_min", 0.9503),
        ("R3", "qsa_layer_max", 0.9958),
        ("R3", "qsa_head_min", 0.7874),
        ("R3", "mass_ratio", 0.8660),
    ),
    Published("Table 16", "oracle past-mass", "lir", 0.98, "%", "", "m = 3"),
    Published("Table 16", "R3", "lir", 6.18, "%", "", "m = 3"),
    Published("Table 16", "R3", "lir_rescued", 341, "count", "", "m = 3"),
    Published("Table 16", "R3", "ttr_median_events", 8, "events", "", "m = 3"),
    Published("Table 16", "R4", "ttr_median_events", 2, "events", "", "m = 3"),
    *(
        Published("Table 18", system, quantity, value, unit, "", "source texts not paired")
        for system, quantity, value, unit in (
            ("promotion off", "fmm", 16.8, "%"),
            ("promotion off", "qsa_mean", 0.947, ""),
            ("promotion off", "mass_ratio", 0.887, ""),
            ("promotion off", "lir", 0.0, "%"),
            ("R3", "fmm", 16.1, "%"),
            ("R3", "qsa_mean", 0.985, ""),
            ("R3", "mass_ratio", 0.955, ""),
            ("R3", "lir", 6.6, "%"),
            ("R3", "promotions", 639, "count"),
        )
    ),
)

FOLLOW_UP: Final[dict[str, Any]] = {
    "condition": "wikitext, Llama-3.1-8B, 512 + 512 tokens, window 8, budget 20 %, q 0.70",
    "fmm32": {"R3": 28.9, "R3 FP-tier-only": 52.3, "h2o": 45.9, "streamingllm": 47.9},
    "missed_mass": {"R3": 9.9, "h2o": 15.2, "streamingllm": 15.6},
    "sink_attention_share": 57,
    "churn": {"with_local": 0.044, "band": 0.0059},
    "windows": {"full": 2, "quant": 26},
    "lir_oracle_m4": 0.55,
    "promotion_lift": 2.34,
    "ruler32k": {
        "niah_single_2": 100.0,
        "niah_single_3": 99.0,
        "niah_multikey_1": 99.80,
        "niah_multikey_2": 97.00,
        "niah_multiquery": 97.00,
        "niah_multivalue": 95.90,
        "cwe": 43.98,
        "qa_1": 84.60,
    },
}
"""What the authors reported later, outside of the article."""

CLAIMS: Final[tuple[tuple[str, str, str, str], ...]] = (
    ("R3 misses less than R1", "R3", "R1", "fmm"),
    ("R3 misses less than R2", "R3", "R2", "fmm"),
    ("R3 misses less than R4", "R3", "R4", "fmm"),
    ("R3 misses less than its full-precision tier alone", "R3", "R3 FP-tier-only", "fmm"),
    ("R3 changes its retained set less than R1, per step", "R3", "R1", "churn_per_step"),
    ("Promotion lowers missed mass", "R3", "promotion off", "fmm"),
    ("INT2 misses less than INT4 at the same bytes", "R3", "INT4", "fmm"),
)
"""(sentence, system that should be lower, system that should be higher, quantity)."""


def published(table: str, system: str, quantity: str, *, model: str = "", condition: str = "") -> float | None:
    """The article's figure, or None where it prints none."""
    for entry in PUBLISHED:
        if (
            (entry.table, entry.system, entry.quantity) == (table, system, quantity)
            and model in ("", entry.model)
            and condition in ("", entry.condition)
        ):
            return entry.value
    return None
