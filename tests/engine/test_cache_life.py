"""One cache after another, several on one model, and what is left after a forward that broke off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from engine.adapter import cache_keyword
from engine.cache import QEvictCache
from engine.config import QEvictConfig
from engine.errors import CacheUseError, UnsupportedModelError
from tests.engine.tiny_steps import NEAR, TIGHT, WHOLE, greedy, model_of, prompt_of, step_logits
from tests.tiny import tiny_model

torch.set_num_threads(1)


@pytest.mark.parametrize("changes", [{}, {"ranker": "key_norm"}, {"prefill_queries": 4}])
def test_reset_makes_it_new(changes: dict[str, Any]) -> None:
    model = model_of("llama", "longrope") if not changes else model_of("llama")
    config = TIGHT.replace(**changes)
    used, fresh = QEvictCache(model, config), QEvictCache(model, config)
    step_logits(model, prompt_of(120, seed=5), 90, used)
    used.reset()
    assert used.get_seq_length() == 0 and used.num_events == 0
    again = step_logits(model, prompt_of(150), 100, used)
    torch.testing.assert_close(again, step_logits(model, prompt_of(150), 100, fresh), atol=0, rtol=0)
    assert torch.equal(used.board, fresh.board)


def test_reset_then_a_prompt_of_one_token_is_scored_by_key_norm() -> None:
    model = model_of("llama")
    config = QEvictConfig(ranker="key_norm", kv_budget_bytes=2 * 9_000, local_tokens=8, planned_new_tokens=120)
    used, fresh = QEvictCache(model, config), QEvictCache(model, config)
    step_logits(model, prompt_of(150), 130, used)
    used.reset()
    for cache in (used, fresh):
        step_logits(model, prompt_of(120), 1, cache)
    assert bool((fresh.board == 4).any()) and torch.equal(used.board, fresh.board)


def test_two_caches_take_turns_on_one_model() -> None:
    model = model_of("llama")
    whole = [prompt_of(130, seed=s) for s in (1, 2)]
    alone = [step_logits(model, w, 90, QEvictCache(model, TIGHT)) for w in whole]
    caches = [QEvictCache(model, TIGHT), QEvictCache(model, TIGHT.replace(backend="eager"))]
    name = cache_keyword(model)
    out: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad():
        for at in range(90, 131):
            for k in (0, 1):
                part = whole[k][:, :90] if at == 90 else whole[k][:, at - 1 : at]
                out[k].append(model(input_ids=part, **{name: caches[k]}).logits[:, -1])
    for k in (0, 1):
        torch.testing.assert_close(torch.stack(out[k], 1), alone[k], **NEAR)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3"])
def test_stock_caches_still_work_on_an_enabled_model(architecture: str) -> None:
    model = model_of(architecture)
    ids = prompt_of(80, 2)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    stock = greedy(model, 20, input_ids=ids, attention_mask=mask)
    QEvictCache(model, TIGHT)
    assert model.config._attn_implementation == "qevict"
    after = greedy(model, 20, DynamicCache(config=model.config), input_ids=ids, attention_mask=mask)
    assert torch.equal(after, stock)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        wanted = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 10:]
        model.set_attn_implementation("qevict")
        got = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 10:]
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-3)


def test_a_forward_that_broke_off_is_noticed_and_reset_mends_it() -> None:
    model = tiny_model()
    whole = prompt_of(120)
    wanted = step_logits(model, whole, 90, QEvictCache(model, TIGHT))
    cache = QEvictCache(model, TIGHT)
    step_logits(model, whole[:, :100], 90, cache)
    name = cache_keyword(model)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    for place in (model.model.layers[0].mlp, model.model.layers[1].self_attn.v_proj):
        hook = place.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(input_ids=whole[:, :1], **{name: cache})
        hook.remove()
        with pytest.raises(CacheUseError, match="reset"), torch.no_grad():
            model(input_ids=whole[:, :1], **{name: cache})
        cache.reset()
        torch.testing.assert_close(step_logits(model, whole, 90, cache), wanted, atol=0, rtol=0)


def test_a_model_with_offloaded_layers_is_refused() -> None:
    model = tiny_model()
    model.model.layers[1].to("meta")
    with pytest.raises(UnsupportedModelError, match=r"these are offloaded .*: 1\."):
        QEvictCache(model, WHOLE)
