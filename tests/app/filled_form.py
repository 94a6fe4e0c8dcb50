"""A form of the Live page as a visitor fills it, for tests of what is made of it."""

from __future__ import annotations

from typing import Any

from app.documents import DEFAULT_DOCUMENT
from app.forms import RunForm
from app.settings import Settings
from presets.loader import load_presets


def form_values(**changes: Any) -> dict[str, Any]:
    values = {
        "document": DEFAULT_DOCUMENT,
        "question": "",
        "own_text": "",
        "file": None,
        "preset": "paper-20",
        "kv_budget": 0.2,
        "quant_share": 0.7,
        "bits": 2,
        "window_size": 8,
        "sink_tokens": 5,
        "local_tokens": "",
        "promotion": True,
        "backend": "auto",
        "new_tokens": 64,
        "temperature": 0,
        "seed": 0,
        "reference": True,
        "ignore_eos": False,
        "model": "embedded",
        "device": "auto",
    }
    return values | changes


def filled_form(lang: str = "en", **changes: Any) -> RunForm:
    return RunForm(form_values(**changes), lang=lang, presets=load_presets(), settings=Settings(max_new_tokens=512))
