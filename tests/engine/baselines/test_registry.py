"""The registry, byte matching, and messages for what can't be."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.baselines import registry
from engine.baselines.base import RunPlan
from engine.baselines.hf_quantized import unavailable
from engine.baselines.matching import BudgetSpec, fit_tokens
from engine.budget import KVShape
from engine.errors import BackendError, BudgetError, ConfigError
from engine.trace import Tier
from tests.engine.baselines.matrix import build, follow, loaded, prompt

SHAPE = KVShape(30, 3, 64, 2)


def test_list_of_systems_is_plain_data() -> None:
    listed = registry.systems()
    assert [info.name for info in listed] == list(registry.names())
    assert len(set(registry.names())) == len(listed)
    json.dumps([info.to_dict() for info in listed])
    kivi = next(info for info in listed if info.name == "kivi-4")
    assert {parameter.name: parameter.default for parameter in kivi.parameters}["bits"] == 4
    assert all(info.storage == "real" for info in listed)
    assert all(info.keeps in ("exact", "lossy", "recoverable") for info in listed)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("nothing", {}, "unknown system"),
        ("snapkv", {"bits": 2}, "no parameter 'bits'"),
        ("snapkv", {"window": 2.5}, "type int"),
        ("snapkv", {"window": 0}, "1 or more"),
        ("snapkv", {"pool": "median"}, "one of avg, max"),
        ("streamingllm", {"positions": "none"}, "one of cache, original"),
        ("zipcache", {"mode": "other"}, "one of paper, repo"),
        ("kvquant-nuq3", {"fisher": 1}, "type bool"),
        ("qevict", {"window_size": 7}, "window_size must be one of"),
    ],
)
def test_mistakes_are_named(name: str, parameters: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.rival(name, parameters).build(loaded().model, RunPlan())


@pytest.mark.parametrize(
    "given_", [{}, {"share": 0.2, "tokens": 5}, {"share": 1.5}, {"tokens": 0}, {"share": 0.2, "reference": "x"}]
)
def test_a_budget_is_one_of_three(given_: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        BudgetSpec(**given_)  # type: ignore[arg-type]


@given(st.integers(20, 4000), st.integers(0, 500), st.integers(20, 3000))
def test_budget_round_trip(prompt_tokens: int, new: int, tokens: int) -> None:
    """tokens → bytes → tokens, and share → bytes, lose nothing."""
    share, total, back = BudgetSpec(tokens=tokens).resolved(SHAPE, prompt_tokens, new)
    assert back == tokens
    assert BudgetSpec(total_bytes=total).resolved(SHAPE, prompt_tokens, new) == (share, total, back)
    assert share == pytest.approx(tokens / (prompt_tokens + new))


def test_prefill_only_methods_pay_for_new_tokens() -> None:
    """Nominal 20 % of 150 + 200 tokens leaves nothing for a prompt of 150; at the prompt alone it is 30 tokens."""
    common = {"fixed": 0, "per_token": SHAPE.token_bytes, "smallest": 2, "keeps_new": True}
    assert fit_tokens(BudgetSpec(share=0.2, reference="prompt"), SHAPE, 150, 200, **common) == 30
    with pytest.raises(BudgetError) as caught:
        fit_tokens(BudgetSpec(share=0.2), SHAPE, 150, 200, **common)
    smallest = caught.value.smallest_share
    assert smallest == pytest.approx(202 / 350, abs=1e-4)
    assert fit_tokens(BudgetSpec(share=smallest), SHAPE, 150, 200, **common) == 2


@pytest.mark.parametrize("name", ["streamingllm", "snapkv", "adakv", "h2o", "random", "critical-adakv", "qevict"])
def test_the_smallest_budget_that_is_named_works(name: str) -> None:
    rival = registry.rival(name)
    with pytest.raises(BudgetError) as caught:
        rival.account(SHAPE, 500, 0, RunPlan(BudgetSpec(share=0.001), 100))
    share = caught.value.smallest_share
    assert f"{caught.value.smallest_bytes:,}" in str(caught.value)
    run = RunPlan(BudgetSpec(share=share), 100)
    assert rival.account(SHAPE, 500, 100, run) <= share * SHAPE.full_kv_bytes(600) + 30


def test_matching_at_the_prompt_leaves_new_tokens_out() -> None:
    snap = registry.rival("snapkv")
    at_prompt = RunPlan(BudgetSpec(share=0.2, reference="prompt"), 200)
    assert snap.account(SHAPE, 1000, 0, at_prompt) == SHAPE.full_kv_bytes(200)
    assert snap.account(SHAPE, 1000, 200, at_prompt) == SHAPE.full_kv_bytes(400)


@pytest.mark.parametrize("name", ["kivi-2", "kivi-4", "zipcache", "kvquant-nuq3"])
def test_qevict_matched_to_a_quantizer(name: str) -> None:
    budget = registry.match_to(name, SHAPE, 1000, 200)
    own = registry.rival(name).account(SHAPE, 1000, 200, RunPlan(None, 200))
    matched = registry.rival("qevict").account(SHAPE, 1000, 199, RunPlan(budget, 200))
    assert 0.97 * own <= matched <= own


@pytest.mark.parametrize("budget", [BudgetSpec(tokens=150), BudgetSpec(share=0.9, reference="prompt")])
def test_qevict_takes_every_form_of_budget(budget: BudgetSpec) -> None:
    model = loaded()
    cache = build("qevict", budget)
    follow(model, cache, prompt(), prompt(1, 20, 1))
    total = budget.model_bytes(cache.kv_shape, 160, 24)
    assert 0.9 * total < cache.persistent_bytes <= total


def test_qevict_residency_is_the_board() -> None:
    model = loaded()
    cache = build("qevict-r2")
    follow(model, cache, prompt(), prompt(1, 20, 1))
    table = cache.residency()
    board = cache.board.view(2, -1)
    window = cache.state.grid
    for block in range(board.shape[1]):
        first = max(0, window.first_column(block))
        last = min(table.shape[2], window.first_column(block + 1))
        expected = Tier.EVICTED if int(board[1, block]) == Tier.EVICTED else Tier.FULL
        assert set(table[1, :, first:last].flatten().tolist()) <= {int(expected)}


@pytest.mark.skipif(unavailable("quanto") is None, reason="the extra package is installed here")
def test_a_missing_package_is_named() -> None:
    assert next(info for info in registry.systems() if info.name == "hf-quantized").unavailable
    with pytest.raises(BackendError, match=r"pip install optimum-quanto"):
        registry.make("hf-quantized", loaded())
