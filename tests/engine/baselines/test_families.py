"""Every rival on every supported family, RoPE and dtype: it runs, counts right and is finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from engine.baselines.matching import BudgetSpec
from tests.engine.baselines.matrix import NEW, RIVALS, build, follow, prompt
from tests.tiny import tiny_loaded


@pytest.mark.parametrize(
    ("architecture", "settings", "tolerance"),
    [
        ("gemma2", {}, 1e-4),
        ("gemma3", {}, 1e-4),
        ("phi3", {"rope": "longrope"}, 1e-4),
        ("qwen3", {}, 1e-4),
        ("mistral", {"rope": "yarn"}, 1e-4),
        ("llama", {"rope": "llama3", "dtype": torch.bfloat16}, 0.3),
        ("llama", {"dtype": torch.float16}, 0.1),
    ],
)
def test_all_rivals(architecture: str, settings: dict[str, Any], tolerance: float) -> None:
    model = tiny_loaded(architecture, head_dim=32, **settings)
    ids, later = prompt(1, 90), prompt(1, 12, 1)
    stock = follow(model, DynamicCache(config=model.model.config), ids, later)
    full_bytes = 0
    for system in RIVALS:
        cache = build(system, BudgetSpec(share=0.6), model)
        logits = follow(model, cache, ids, later)
        assert bool(torch.isfinite(logits).all()), system
        assert cache.get_seq_length(cache.managed_layers[0]) == 102, system
        # The prompt is attended in full precision by every system.
        torch.testing.assert_close(logits[:, 0], stock[:, 0], atol=tolerance, rtol=tolerance, msg=system)
        if system == "fullkv":
            torch.testing.assert_close(logits, stock, atol=tolerance, rtol=tolerance)
            full_bytes = cache.persistent_bytes
        else:
            assert cache.persistent_bytes < full_bytes * (90 + NEW) / 102 * 0.75, system
