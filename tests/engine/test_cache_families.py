"""Real architectures through an unmodified `model.generate` and a plain step loop, against stock."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from engine.adapter import cache_keyword
from engine.cache import QEvictCache
from engine.config import QEvictConfig
from engine.errors import UnsupportedModelError
from tests.engine.drive import BACKENDS, RowView, check_bytes, check_prefixes
from tests.engine.tiny_steps import NEAR, TIGHT, WHOLE, greedy, model_of, prompt_of, step_logits
from tests.tiny import ARCHITECTURES, COMBINATIONS, GROUPS, tiny_model

torch.set_num_threads(1)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_whole_budget_gives_the_same_200_tokens(architecture: str, batch: int) -> None:
    model = model_of(architecture)
    ids = prompt_of(60, batch)
    mask = torch.ones_like(ids)
    if batch == 2:
        ids[1, :13], mask[1, :13] = 257, 0
    stock = greedy(model, 200, input_ids=ids, attention_mask=mask)
    cache = QEvictCache(model, WHOLE)
    mine = greedy(model, 200, cache, input_ids=ids, attention_mask=mask)
    assert stock.shape == (batch, 200) and torch.equal(mine, stock)
    assert cache.get_seq_length() == 259 and cache.num_events > 20


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("architecture, rope", COMBINATIONS)
def test_whole_budget_equals_stock(architecture: str, rope: str, backend: str) -> None:
    """Left-padded batch, 24 greedy tokens, and teacher-forced logits, for every family and kind of RoPE."""
    model = model_of(architecture, rope)
    ids = prompt_of(70, 2)
    mask = torch.ones_like(ids)
    ids[0, :9], mask[0, :9] = 257, 0
    stock = greedy(model, 24, input_ids=ids, attention_mask=mask)
    config = WHOLE.replace(backend=backend)
    assert torch.equal(greedy(model, 24, QEvictCache(model, config), input_ids=ids, attention_mask=mask), stock)
    whole = torch.cat([prompt_of(70), stock[1:]], 1)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = model(input_ids=whole).logits[:, 69:]
        scale = float(wanted.std())
        if architecture != "gemma2":  # stock SDPA forgets gemma2's softcap
            model.set_attn_implementation("sdpa")
            apart = float((model(input_ids=whole).logits[:, 69:] - wanted).abs().max())
        else:
            apart = 0.0
    got = step_logits(model, whole, 70, QEvictCache(model, config))
    assert float((got - wanted).abs().max()) <= max(2 * apart, 2e-5 * scale)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tight_budget_runs_and_agrees_with_eager(architecture: str, backend: str) -> None:
    """Quantized and evicting: all backends give eager's logits, bytes fit, keys of Full are the model's own."""
    model = model_of(architecture)
    whole = prompt_of(150)
    caches = [QEvictCache(model, TIGHT.replace(backend=name)) for name in ("eager", backend)]
    wanted, got = (step_logits(model, whole, 90, cache) for cache in caches)
    torch.testing.assert_close(got, wanted, **NEAR)
    store = caches[1].state.pool
    assert int(store.live_count.min()) > 0 and bool((caches[1].board == 4).any())
    check_bytes(caches[1])
    check_prefixes(caches[1])
    assert caches[1].state.columns == 150 and caches[1].managed_layers == (
        [1, 3] if architecture.startswith("gemma") else [0, 1]
    )


@pytest.mark.parametrize("rope", ["yarn", "llama3", "longrope", "linear"])
def test_stretched_rope_survives_eviction(rope: str) -> None:
    """INT4 with everything resident stays near stock: un-rotation uses the model's own table and scaling."""
    model = model_of("llama", rope)
    whole = prompt_of(120)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        stock = model(input_ids=whole).logits[:, 79:].log_softmax(-1)
    config = QEvictConfig(kv_budget=0.9, bits=4, quant_share=1.0, local_tokens=8, planned_new_tokens=40)
    cache = QEvictCache(model, config)
    got = step_logits(model, whole, 80, cache).log_softmax(-1)
    assert not bool((cache.board == 4).any()) and bool((cache.board == 3).any())
    kl = (stock.exp() * (stock - got)).sum(-1).mean()
    scrambled = QEvictCache(model, config)
    scrambled.parts[0].rope.undo = lambda key, positions: key.float()  # type: ignore[method-assign]
    wrong = step_logits(model, whole, 80, scrambled).log_softmax(-1)
    assert float(kl) < 0.1 * float((stock.exp() * (stock - wrong)).sum(-1).mean())


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_query_groups(groups: int, backend: str) -> None:
    model = model_of("llama", groups=groups)
    whole = prompt_of(110)
    wanted = step_logits(model, whole, 80, QEvictCache(model, TIGHT.replace(backend="eager")))
    got = step_logits(model, whole, 80, QEvictCache(model, TIGHT.replace(backend=backend)))
    torch.testing.assert_close(got, wanted, **NEAR)


def test_positions_are_right_after_many_evictions() -> None:
    """What the rotary module is asked for, and the keys that lie in the cache, are those of the true position."""
    model = model_of("llama")
    asked: list[torch.Tensor] = []
    rotary = model.model.rotary_emb
    hook = rotary.register_forward_pre_hook(
        lambda _, args, kwargs: asked.append(kwargs.get("position_ids", args[1] if len(args) > 1 else None)),
        with_kwargs=True,
    )
    ids = prompt_of(100, 2)
    mask = torch.ones_like(ids)
    mask[1, :17] = 0
    cache = QEvictCache(model, TIGHT)
    new = greedy(model, 60, cache, input_ids=ids, attention_mask=mask)
    hook.remove()
    assert bool((cache.board == 4).sum() > 10)
    decoded = [p for p in asked if p.shape[-1] == 1]
    assert [p[0, 0].item() for p in decoded] == list(range(100, 159))
    assert [p[-1, 0].item() for p in decoded] == list(range(83, 142))
    # Layer 0's keys depend on token and position alone.
    attention, shape = model.model.layers[0].self_attn, cache.state.shape
    every = torch.cat([ids, new], 1)
    with torch.no_grad():
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(every))
        plain = attention.k_proj(hidden).view(2, -1, shape.heads, shape.head_dim).transpose(1, 2)
    checked = 0
    for row, pad in enumerate((0, 17)):
        view = RowView(cache, row)
        for block, slot in view.arena.items():
            if block in view.shadows:
                continue
            for inside, column in enumerate(cache.state.pool.columns(torch.tensor(block)).tolist()):
                if pad <= column < 159:
                    at = torch.tensor([column - pad])
                    wanted = cache.parts[0].rope.apply(plain[row, :, column].clone(), at.expand(shape.heads))
                    torch.testing.assert_close(cache.state.pool.arena_key[row, :, slot, inside], wanted,
                                               atol=1e-5, rtol=1e-4)  # fmt: skip
                    checked += 1
    assert checked > 40


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_models(dtype: torch.dtype, backend: str) -> None:
    """Whole budget: near stock in the same dtype. Tight budget, padded: finite and near eager."""
    model = tiny_model("llama", dtype=dtype)
    whole = prompt_of(100)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        stock = model(input_ids=whole).logits[:, 69:].float()
    exact = step_logits(tiny_model("llama"), whole, 70, DynamicCache()).float()
    noise = float((stock - exact).abs().max())
    got = step_logits(model, whole, 70, QEvictCache(model, WHOLE.replace(backend=backend))).float()
    assert float((got - exact).abs().max()) <= 2.5 * noise
    ids = prompt_of(60, 3)
    mask = torch.ones_like(ids)
    mask[0, :11], mask[2, :40] = 0, 0
    cache = QEvictCache(model, TIGHT.replace(backend=backend, kv_budget=0.5))
    with torch.no_grad():
        new = model.generate(input_ids=ids, attention_mask=mask, **{cache_keyword(model): cache}, max_new_tokens=30,
                             do_sample=False, output_logits=True, return_dict_in_generate=True)  # fmt: skip
    assert all(bool(step.isfinite().all()) for step in new.logits)
    assert cache.state.pool.dtype == dtype


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32", "model"])
def test_kv_dtype_is_what_is_stored(stored: str) -> None:
    model = model_of("llama")
    cache = QEvictCache(model, TIGHT.replace(kv_dtype=stored, kv_budget=0.5))
    logits = step_logits(model, prompt_of(110), 80, cache)
    assert bool(logits.isfinite().all()) and logits.dtype == torch.float32
    wanted = torch.float32 if stored == "model" else getattr(torch, stored)
    assert cache.state.pool.arena_key.dtype == wanted == cache.stored_dtype
    assert cache.kv_shape.element_bytes == wanted.itemsize
    check_bytes(cache)


@pytest.mark.parametrize("backend", BACKENDS)
def test_constant_and_huge_channels_give_no_nan(backend: str) -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        with torch.no_grad():
            layer.self_attn.v_proj.weight[:7] = 0.0
            layer.self_attn.k_proj.weight[:5] = 0.0
            layer.self_attn.v_proj.weight[8] *= 1e3
    config = QEvictConfig(kv_budget=0.5, quant_share=1.0, local_tokens=8, planned_new_tokens=40, backend=backend)
    logits = step_logits(model, prompt_of(120), 80, QEvictCache(model, config))
    assert bool(logits.isfinite().all())


# ---- generate, unmodified --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [
    {"do_sample": True, "temperature": 0.9, "top_k": 20},
    {"do_sample": True, "num_return_sequences": 3},
    {"num_beams": 4, "do_sample": False},
    {"num_beams": 4, "num_return_sequences": 2, "do_sample": False, "length_penalty": 0.5},
    {"do_sample": False, "prefill_chunk_size": 16},
    {"do_sample": False, "repetition_penalty": 1.3},
])  # fmt: skip
def test_ways_of_generating_equal_stock_at_whole_budget(how: dict[str, Any]) -> None:
    model = model_of("llama")
    ids = prompt_of(50, 2)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    answers = []
    for cache in (None, QEvictCache(model, WHOLE)):
        if cache is None:
            model.set_attn_implementation("eager")
        torch.manual_seed(7)
        with torch.no_grad():
            answers.append(
                model.generate(
                    input_ids=ids, attention_mask=mask, **{cache_keyword(model): cache}, max_new_tokens=25, **how
                )
            )
        model.set_attn_implementation("qevict")
    assert torch.equal(answers[0], answers[1])


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}])
def test_ways_of_generating_run_below_the_whole_budget(how: dict[str, Any]) -> None:
    model = model_of("llama")
    cache = QEvictCache(model, TIGHT)
    torch.manual_seed(0)
    with torch.no_grad():
        out = model.generate(input_ids=prompt_of(90, 2), **{cache_keyword(model): cache}, max_new_tokens=40, **how)
    assert out.shape[1] == 130
    check_bytes(cache)
    check_prefixes(cache)
    assert cache.batch == 6


def test_beams_take_their_pools_along() -> None:
    """After a reorder each row holds what its source row held; the engine goes on as that row would have."""
    model = model_of("llama")
    whole = prompt_of(100, 3)
    cache, other = QEvictCache(model, TIGHT), QEvictCache(model, TIGHT)
    step_logits(model, whole, 90, cache)
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    step_logits(model, whole[order], 90, other)
    name = cache_keyword(model)
    with torch.no_grad():
        for at in range(30):
            token = prompt_of(1, 3, seed=at)
            a, b = (model(input_ids=token, **{name: c}).logits for c in (cache, other))
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert torch.equal(cache.board, other.board)


@pytest.mark.parametrize("architecture", ["phi3", "llama"])
def test_a_longrope_prompt_beyond_the_original_length(architecture: str) -> None:
    """phi3 drops a truthy cache there and would silently run on one of its own."""
    model = tiny_model(architecture, rope="longrope", positions=256)
    ids = prompt_of(90)
    stock = greedy(model, 20, input_ids=ids, attention_mask=torch.ones_like(ids))
    cache = QEvictCache(model, WHOLE)
    assert torch.equal(greedy(model, 20, cache, input_ids=ids, attention_mask=torch.ones_like(ids)), stock)
    assert cache.get_seq_length() == 109
    with pytest.raises(UnsupportedModelError, match="longrope"):
        step_logits(model, prompt_of(80), 50, QEvictCache(model, WHOLE))


def test_dynamic_rope_beyond_its_length_equals_stock() -> None:
    """Frequencies change as the sequence grows; keys keep the rotation that they came with, as in stock."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = tiny_model(positions=64, rope_parameters=dynamic)
    model.set_attn_implementation("eager")
    whole = prompt_of(90)
    wanted = step_logits(model, whole, 50, DynamicCache())
    model = tiny_model(positions=64, rope_parameters=dynamic)
    got = step_logits(model, whole, 50, QEvictCache(model, WHOLE))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-3)


def test_threads_share_one_model() -> None:
    model = model_of("llama")
    prompts = [prompt_of(90, seed=s) for s in range(4)]
    caches = [QEvictCache(model, TIGHT) for _ in range(8)]
    alone = [step_logits(model, p, 60, caches[i]) for i, p in enumerate(prompts)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda i: step_logits(model, prompts[i], 60, caches[4 + i]), range(4)))
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(b, a, atol=0, rtol=0)
