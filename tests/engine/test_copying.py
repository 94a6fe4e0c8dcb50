"""A model that copies a text through an evicting cache goes on with the text; it does not fall into a loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.adapter import cache_keyword
from engine.baselines import registry
from engine.baselines.matching import BudgetSpec
from engine.embedded import packaged_file
from engine.models import load_model
from engine.trace import Tier

DOCUMENT = Path(__file__).parents[2] / "assets" / "documents" / "bakery-order-book.txt"


def distinct(tokens: list[int], length: int = 4) -> float:
    """Share of the runs of `length` tokens that occur once only."""
    runs = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
    return len(set(runs)) / len(runs)


def test_an_evicting_run_on_a_copy_task_is_no_loop() -> None:
    """At 40 % of the bytes: new four-grams all along, and the text's own words first."""
    if packaged_file() is None:
        pytest.skip("the embedded model is not installed")
    loaded = load_model("embedded")
    text = loaded.tokenizer(DOCUMENT.read_text("utf-8"))["input_ids"][:448]
    again = loaded.tokenizer("\n\nAgain, word for word:\n\n")["input_ids"]
    prompt = torch.tensor([[*text, *again, *text[:24]]])
    cache = registry.make("qevict", loaded, BudgetSpec(share=0.4), new_tokens=64)
    out = loaded.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        **{cache_keyword(loaded.model): cache},
        max_new_tokens=64,
        do_sample=False,
        pad_token_id=loaded.tokenizer.eos_token_id,
    )
    new = out[0, prompt.shape[1] :].tolist()
    assert cache.plan.quant_capacity > 0 and (cache.board == int(Tier.EVICTED)).any()
    assert distinct(new) > 0.5
    assert new[:8] == text[24:32]
