"""Result files as `qevict eval` and `qevict diagnose` write them, for tests of what is drawn of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.visuals.synthetic import NASTY

MEAN = {"mean": 0.2, "low": 0.1, "high": 0.4, "n": 20}


def score(system: str, share: float, **more: Any) -> dict[str, Any]:
    line = {"task": "book", "length": 768, "question": "after", "label": system, "system": system, "kv_budget": share}
    line |= {"parameters": {}, "n": 20, "infeasible": None, "note": "", "score_name": "top1", "share": share}
    return line | {"bytes": 1000, "score": MEAN, "kl": MEAN, "nll_minus_full": MEAN, "score_minus_full": None, **more}


ANSWER: dict[str, Any] = {
    "suite": "quick",
    "model": "tiny <b>model</b>",
    "weights": "float32",
    "kv_dtype": "float16",
    "machine": {"processor": "abacus", "cores": 2, "isa": None, "torch": "0"},
    "left_out": ["speed"],
    "scores": [
        score("fullkv", 1.0),
        score("qevict", 0.2),
        score(NASTY, 0.1),
        score("kivi-2", 0.3, n=0, infeasible="no"),
    ],
    "rivals": [
        {
            "kv_budget": 0.2,
            "rival": "h2o",
            "kl_difference": MEAN,
            "verdict_kl": "not settled",
            "score_difference": None,
            "verdict_score": None,
        }
    ],
    "directions": [
        {
            "kv_budget": 0.2,
            "claim": "R3 misses less than R1",
            "quantity": "fmm",
            "lower": "R3",
            "higher": "R1",
            "lower_mean": 0.1,
            "higher_mean": 0.2,
            "difference": {"mean": -0.1, "low": -0.2, "high": -0.05, "n": 20},
            "verdict": "holds",
        }
    ],
    "policies": [
        {
            "kv_budget": 0.2,
            "policy": "R3",
            "texts": 20,
            **dict.fromkeys(("fmm", "fmm_history", "churn_per_event", "churn_per_step", "lir", "promotions"), MEAN),
            "mass_share_history": {"full": 0.2, "quant": 0.4, "evicted": 0.4},
        }
    ],
    "promotion": [
        {
            "kv_budget": 0.2,
            "texts": 20,
            "promotions": 3,
            "net_gain": MEAN,
            "fmm_on_minus_off": MEAN,
            "lift": None,
            "paper_lift": 2.34,
        }
    ],
    "ablation": [
        {
            "setting": "q",
            "value": v,
            "task": "book",
            "length": 768,
            "question": "after",
            "figure": "kl",
            "mean": MEAN,
            "minus_article_choice": MEAN,
            "verdict": "not measured",
            "infeasible": None,
        }
        for v in (0.5, 0.7)
    ],
}  # fmt: skip
EMPTY_RETURNS = {"min_events": 3, "eligible": 5, "rescued": 2, "events": {"3": 2}, "tokens": {"24": 2}}
DIAGNOSIS: dict[str, Any] = {
    "setup": {
        "model": "tiny",
        "weights": "float32",
        "kv_dtype": "float16",
        "prompt_tokens": 90,
        "steps": 6,
        "horizon": 4,
        "config": {"kv_budget": 0.2},
    },
    "differs": ["model: tiny"],
    "table14": [
        {"system": "R3", "quantity": "fmm", "measured": 12.0, "paper": 46.38, "unit": "%", "source": source}
        for source in ("trace", "live")
    ],
    "table15": None,
    "figure1": [
        {"system": "R3", "quantity": q, "measured": 30.0, "paper": 20.0, "unit": "%", "source": "trace"}
        for q in ("full", "quant", "evicted")
    ],
    "series": {
        "fmm": {"R3": {"tokens": [90, 98], "all": [0.1, 0.2], "history": [0.3, 0.4], "steps": [4, 2]}},
        "returns": {"R3": EMPTY_RETURNS},
        "agreement": {
            "R3": {
                "events": [0, 1],
                "by_head": {form: [[0.9, None], [0.8, 0.7]] for form in ("cumulative", "interval")},
                "qsa": {"cumulative": [1.0, 0.9], "interval": [None, 0.9]},
                "ratio": {"cumulative": [1.0, 0.9], "interval": [None, 0.9]},
            }
        },
    },
}  # fmt: skip


def write(folder: Path, name: str, content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path
