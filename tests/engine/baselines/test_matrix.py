"""What holds for every system, whatever it keeps: one matrix that a new system joins by being registered."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from engine.adapter import cache_keyword
from engine.attention.softmax import merge
from engine.baselines import registry
from engine.baselines.kvquant import KVQuant
from engine.baselines.matching import BudgetSpec
from engine.errors import BudgetError, CacheUseError
from engine.trace import Tier
from tests.engine.baselines.matrix import (
    BUDGETED,
    NEW,
    PROMPT,
    RIVALS,
    SHARE,
    SYSTEMS,
    build,
    feed,
    follow,
    loaded,
    plan,
    prompt,
    settings,
)


@pytest.mark.parametrize("kv_dtype", ["model", "float16"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_accountant_equals_summed_nbytes(system: str, kv_dtype: str) -> None:
    model = loaded()
    cache = build(system, kv_dtype=kv_dtype)
    follow(model, cache, prompt(), prompt(1, 3, 1))
    name, parameters = settings(system)
    rival = registry.rival(name, parameters)
    shape, run = cache.kv_shape, plan(model, kv_dtype=kv_dtype)
    for generated in (3, 4, 14, NEW - 1):
        done = cache.get_seq_length() - PROMPT
        for step in range(done, generated):
            feed(model, cache, prompt(1, 1, step), start=PROMPT + step)
        held = sum(tensor.nbytes for tensor in cache.persistent_tensors().values())
        if isinstance(rival, KVQuant):
            coded = PROMPT + generated - rival.sinks
            found = [resident.counters for resident in cache.residents]
            expected = sum(
                rival.fixed_bytes(shape, coded, count["key_outliers"], count["value_outliers"])
                + rival.sinks * shape.token_bytes
                for count in found
            )
        else:
            expected = rival.account(shape, PROMPT, generated, run)
        if not system.startswith("qevict"):
            assert held == expected
        assert cache.persistent_bytes == expected
        assert cache.allocated_bytes >= cache.persistent_bytes


@pytest.mark.parametrize("system", BUDGETED)
def test_bytes_at_the_end_stay_within_the_budget(system: str) -> None:
    model = loaded()
    cache = build(system)
    follow(model, cache, prompt(), prompt(1, NEW - 1, 1))
    budget = cache.kv_shape.full_kv_bytes(PROMPT + NEW) * SHARE
    assert 0.8 * budget < cache.persistent_bytes <= budget
    assert bool((cache.residency() == Tier.EVICTED).any()) or system.startswith("qevict")


@pytest.mark.parametrize("system", BUDGETED)
def test_whole_budget_is_fullkv(system: str) -> None:
    model = loaded()
    name, parameters = settings(system)
    extra = {"quant_share": 0.0} if name.startswith("qevict") else {}
    cache = registry.make(name, model, BudgetSpec(share=1.0), new_tokens=NEW, parameters=parameters | extra)
    ids, later = prompt(), prompt(1, NEW - 1, 1)
    got = follow(model, cache, ids, later)
    full = follow(model, build("fullkv"), ids, later)
    if name.startswith("qevict"):
        torch.testing.assert_close(got, full, atol=2e-5, rtol=2e-5)
    else:
        assert torch.equal(got, full)
    assert not bool((cache.residency() == Tier.EVICTED).any())


def test_fullkv_is_the_models_own_cache() -> None:
    model = loaded()
    ids, later = prompt(), prompt(1, 8, 1)
    full = follow(model, build("fullkv"), ids, later)
    stock = follow(model, DynamicCache(config=model.model.config), ids, later)
    torch.testing.assert_close(full, stock, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("system", SYSTEMS)
def test_rows_of_a_batch_do_not_know_each_other(system: str) -> None:
    model = loaded()
    ids, later, pads = prompt(3), prompt(3, 12, 1), [0, 7, 30]
    for row, pad in enumerate(pads):
        ids[row, :pad] = 257
    together = follow(model, build(system), ids, later, pads)
    order = [2, 0, 1]
    permuted = follow(model, build(system), ids[order], later[order], [pads[row] for row in order])
    torch.testing.assert_close(permuted, together[order], atol=1e-4, rtol=1e-4)
    for row, pad in enumerate(pads):
        alone = follow(model, build(system), ids[row : row + 1], later[row : row + 1], [pad])
        torch.testing.assert_close(alone, together[row : row + 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_padding_holds_does_not_matter(system: str) -> None:
    model = loaded()
    ids, later = prompt(), prompt(1, 12, 1)
    other = ids.clone()
    other[:, :11] = prompt(1, 11, 9)
    first = follow(model, build(system), ids, later, [11])
    assert torch.equal(follow(model, build(system), other, later, [11]), first)


@pytest.mark.parametrize("system", [name for name in BUDGETED if not name.startswith("qevict")])
def test_padding_is_not_there_at_a_budget_in_tokens(system: str) -> None:
    """The same tokens, with and without padding in front, keep the same and answer the same."""
    if system == "random":
        pytest.skip("lots are drawn for a number of columns")
    model = loaded()
    budget = BudgetSpec(tokens=120)
    ids, later = prompt(1, 150), prompt(1, 12, 1)
    plain = build(system, budget)
    want = follow(model, plain, ids, later)
    padded = build(system, budget)
    got = follow(model, padded, torch.cat([torch.full((1, 10), 257), ids], 1), later, [10])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert torch.equal(padded.residency()[:, :, 10:], plain.residency())


@pytest.mark.parametrize("system", SYSTEMS)
def test_samples_are_independent(system: str) -> None:
    model = loaded()
    first, second, later = prompt(seed=3), prompt(1, PROMPT - 9, 4), prompt(1, 6, 1)
    alone = follow(model, build(system), second, later)
    follow(model, build(system), first, later)
    assert torch.equal(follow(model, build(system), second, later), alone)
    used = build(system)
    follow(model, used, first, later)
    used.reset()
    assert used.get_seq_length() == 0
    assert torch.equal(follow(model, used, second, later), alone)


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_exception_leaves_the_model_as_it_was(system: str) -> None:
    model = loaded()
    ids = prompt(1, 40)
    before = feed(model, DynamicCache(config=model.model.config), ids)
    hook = model.model.model.layers[1].register_forward_pre_hook(_fail)
    try:
        cache = build(system)
        with pytest.raises(ZeroDivisionError):
            feed(model, cache, ids)
    finally:
        hook.remove()
    with pytest.raises(CacheUseError, match=r"did not finish|attended without"):
        feed(model, cache, ids)
    assert torch.equal(feed(model, DynamicCache(config=model.model.config), ids), before)


def _fail(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("groups", [1, 3, 7])
@pytest.mark.parametrize("system", RIVALS)
def test_attention_is_dense_attention_over_what_is_resident(system: str, groups: int) -> None:
    model = loaded(groups=groups)
    pads = [0, 9]
    cache = build(system, model=model)
    follow(model, cache, prompt(2), prompt(2, 12, 1), pads)
    for index, resident in enumerate(cache.residents):
        query = torch.randn(2, 2 * groups, 1, 32, generator=torch.Generator().manual_seed(index))
        got, _ = merge(resident.parts(query, 0.2, None))
        capped, _ = merge(resident.parts(query, 0.2, 5.0))
        for row in range(2):
            for head, (key, value) in enumerate(resident.dense(row)):
                own = slice(head * groups, (head + 1) * groups)
                logits = query[row, own, 0] @ key.T * 0.2
                torch.testing.assert_close(got[row, own, 0], logits.softmax(-1) @ value, atol=1e-5, rtol=1e-4)
                soft = (5.0 * torch.tanh(logits / 5.0)).softmax(-1) @ value
                torch.testing.assert_close(capped[row, own, 0], soft, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("system", RIVALS)
def test_positions_are_unique_and_known(system: str) -> None:
    model = loaded()
    cache = build(system)
    follow(model, cache, prompt(), prompt(1, 12, 1))
    table = cache.residency()
    assert table.shape[2] == cache.get_seq_length() == PROMPT + 12
    for layer, resident in enumerate(cache.residents):
        for head, (key, value) in enumerate(resident.dense(0)):
            there = int(((table[layer, head] == Tier.FULL) | (table[layer, head] == Tier.QUANT)).sum())
            assert key.shape == value.shape == (there, 32)
    assert bool((table[:, :, -1] == Tier.FULL).all() or (table[:, :, -1] == Tier.QUANT).all())


@pytest.mark.parametrize("system", ["snapkv", "adakv", "layer-defensivekv", "random", "h2o", "streamingllm original"])
def test_residency_names_the_very_tokens(system: str) -> None:
    """Stored values are those of the columns that residency names."""
    model = loaded()
    cache, full = build(system), build("fullkv", kv_dtype="model")
    ids, later = prompt(), prompt(1, 1, 1)
    follow(model, cache, ids, later)
    follow(model, full, ids, later)
    table = cache.residency()
    key, value = full.residents[0].dense(0)[1]
    there = table[0, 1] == Tier.FULL
    own_key, own_value = cache.residents[0].dense(0)[1]
    for own, whole in ((own_key, key[there]), (own_value, value[there])):
        assert torch.equal(own.sort(dim=0).values, whole.sort(dim=0).values)


@pytest.mark.parametrize("system", SYSTEMS)
def test_generate_knows_true_positions(system: str) -> None:
    """`model.generate` takes positions from the cache's length; a loop with explicit positions must agree."""
    model = loaded()
    ids = prompt()
    out = model.model.generate(ids, max_new_tokens=12, do_sample=False, **{cache_keyword(model.model): build(system)})
    logits = follow(model, build(system), ids, out[:, PROMPT:-1])
    assert logits.argmax(-1).tolist() == out[:, PROMPT:].tolist()


@pytest.mark.parametrize("system", BUDGETED)
def test_a_larger_budget_never_evicts_a_superset(system: str) -> None:
    model = loaded()
    tables = []
    for share in (0.65, 0.75, 0.9):
        cache = build(system, BudgetSpec(share=share))
        follow(model, cache, prompt(), prompt(1, 12, 1))
        tables.append(cache.residency() == Tier.EVICTED)
    for small, large in pairwise(tables):
        assert not (bool((large & small == small).all()) and bool((large & ~small).any()))
        assert int(large.sum()) <= int(small.sum())


@pytest.mark.parametrize("system", SYSTEMS)
def test_runs_repeat(system: str) -> None:
    model = loaded()
    first, second = build(system, seed=5), build(system, seed=5)
    a = follow(model, first, prompt(), prompt(1, 12, 1))
    assert torch.equal(follow(model, second, prompt(), prompt(1, 12, 1)), a)
    assert torch.equal(first.residency(), second.residency())


@pytest.mark.parametrize("system", SYSTEMS)
def test_constant_keys_and_values_give_no_nan(system: str) -> None:
    model = loaded("qwen2")
    attentions = [layer.self_attn for layer in model.model.model.layers]
    kept = [{name: weight.clone() for name, weight in module.state_dict().items()} for module in attentions]
    try:
        with torch.no_grad():
            for module in attentions:
                module.k_proj.weight.zero_()
                module.v_proj.weight.zero_()
                module.v_proj.bias.fill_(0.5)
        logits = follow(model, build(system, model=model), prompt(), prompt(1, 20, 1))
    finally:
        for module, weights in zip(attentions, kept, strict=True):
            module.load_state_dict(weights)
    assert bool(torch.isfinite(logits).all())


@pytest.mark.parametrize("tokens", [1, 2, 5, 9, 33])
@pytest.mark.parametrize("system", SYSTEMS)
def test_short_prompts(system: str, tokens: int) -> None:
    """Also below the observation window, here at its default of 32; a budget that can't be met says so at once."""
    model = loaded()
    name, parameters = settings(system)
    parameters.pop("window", None)
    cache = registry.make(name, model, BudgetSpec(tokens=tokens // 2 + 21), new_tokens=20, parameters=parameters)
    try:
        registry.rival(name, parameters).account(
            cache.kv_shape, tokens, 0, plan(model, BudgetSpec(tokens=tokens // 2 + 21), 20)
        )
    except BudgetError as error:
        assert f"{error.smallest_bytes:,}" in str(error)
        with pytest.raises(BudgetError):
            follow(model, cache, prompt(1, tokens), prompt(1, 2, 1))
        return
    logits = follow(model, cache, prompt(1, tokens), prompt(1, 20, 1))
    assert bool(torch.isfinite(logits).all())
    assert cache.get_seq_length() == tokens + 20


@pytest.mark.parametrize("system", SYSTEMS)
def test_chunked_prompt_equals_one_shot(system: str) -> None:
    model = loaded()
    ids, later = prompt(2), prompt(2, 6, 1)
    pads = [0, 20]
    whole = follow(model, build(system), ids, later, pads)
    chunked = follow(model, build(system), ids, later, pads, chunk=37)
    # Sums in another order may turn a code of a quantizer over.
    torch.testing.assert_close(chunked, whole, atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_later_turn(system: str) -> None:
    """A second multi-token turn after compression: causal, counted, and independent of later tokens."""
    model = loaded()
    turn = prompt(1, 30, 2)
    outputs = []
    for length in (30, 20):
        cache = build(system)
        follow(model, cache, prompt(), prompt(1, 4, 1))
        out = feed(model, cache, turn[:, :length], start=PROMPT + 4)
        outputs.append(out[:, :20])
        tail = feed(model, cache, prompt(1, 1, 3), start=PROMPT + 4 + length)
        assert bool(torch.isfinite(tail).all())
        assert cache.get_seq_length() == PROMPT + 5 + length
        assert cache.residency().shape[2] == PROMPT + 5 + length
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("system", SYSTEMS)
def test_rows_can_be_reordered_between_steps(system: str) -> None:
    model = loaded()
    ids, later = prompt(2), prompt(2, 12, 1)
    pads = [0, 13]
    plain, turned = build(system), build(system)
    follow(model, plain, ids, later, pads)
    follow(model, turned, ids, later, pads)
    with torch.inference_mode():
        turned.reorder_cache(torch.tensor([1, 0]))
    last = prompt(2, 1, 5)
    want = feed(model, plain, last, pads, PROMPT + 12)
    got = feed(model, turned, last[[1, 0]], pads[::-1], PROMPT + 12)
    torch.testing.assert_close(got, want[[1, 0]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("system", SYSTEMS)
def test_half_precision_models(system: str) -> None:
    model = loaded()
    want = follow(model, build(system, kv_dtype="float16"), prompt(), prompt(1, 8, 1))
    assert want.dtype == torch.float32
    assert bool(torch.isfinite(want).all())


class _Kernels(TorchDispatchMode):
    """Counts operator calls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("system", RIVALS)
def test_a_step_has_no_loop_over_rows_or_heads(system: str) -> None:
    """Operator calls of a step do not grow with batch rows."""
    model = loaded()
    counts = []
    for rows in (1, 4):
        cache = build(system)
        follow(model, cache, prompt(rows), prompt(rows, 2, 1))
        key = torch.randn(rows, 2, 1, 32)
        with torch.inference_mode(), _Kernels() as kernels:
            cache.residents[0].step(torch.randn(rows, 6, 1, 32), key, key, 0.2, None)
        counts.append(kernels.count)
    assert counts[1] <= counts[0] + 12
