"""Several systems on one prompt: teacher-forced beside FullKV, and each on its own."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from engine.adapter import cache_keyword
from engine.baselines import registry
from engine.baselines.recorder import FutureMasses
from engine.compare import BudgetSpec, CompareOptions, CompareResult, CompareStep, SystemChoice, compare, iter_compare
from engine.comparison import churn, frame, same_sets
from engine.errors import BudgetError, ConfigError, PromptError
from engine.models import LoadedModel
from engine.trace import Progress, Tier
from tests.tiny import tiny_loaded

torch.set_num_threads(1)
TEXT = "A tide table is a short story about the moon. " * 5
OPTIONS = CompareOptions(budget=BudgetSpec(share=0.5), max_new_tokens=20, chat=False)
SMALL = {"window": 8}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_loaded(head_dim=32)


@pytest.fixture(scope="module")
def result(loaded: LoadedModel) -> CompareResult:
    choices = ["fullkv", "qevict", SystemChoice("snapkv", SMALL), SystemChoice("kivi-4", {"residual": 32})]
    return compare(loaded, TEXT, choices, OPTIONS)


def _greedy(loaded: LoadedModel, count: int) -> tuple[list[int], torch.Tensor]:
    """Tokens of stock greedy decoding, and the logits that chose them."""
    ids = loaded.tokenizer(TEXT)["input_ids"]
    cache = DynamicCache(config=loaded.model.config)
    tokens, logits = [], []
    fed = ids
    with torch.inference_mode():
        for _ in range(count):
            out = loaded.model(torch.tensor([fed]), use_cache=True, **{cache_keyword(loaded.model): cache})
            logits.append(out.logits[0, -1])
            tokens.append(int(logits[-1].argmax()))
            fed = tokens[-1:]
    return tokens, torch.stack(logits)


def test_tokens_are_fullkvs(loaded: LoadedModel, result: CompareResult) -> None:
    tokens, logits = _greedy(loaded, 20)
    assert result.token_ids == tokens
    losses = -logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[1:]
    assert result.perplexity == pytest.approx(float(losses.mean().exp()), rel=1e-3)


def test_fullkv_against_itself(result: CompareResult) -> None:
    full = result.systems[0]
    assert full.kl == pytest.approx(0.0, abs=1e-6)
    assert full.agreement == 1.0
    assert full.perplexity_difference == pytest.approx(0.0, abs=1e-4)
    assert max(full.output_error) < 1e-4
    assert (full.fmm, full.fmm_fp_only, full.churn) == (0.0, 0.0, 0.0)
    assert full.share == pytest.approx(1.0)


def test_figures_of_the_others(result: CompareResult) -> None:
    for system in result.systems:
        assert system.bytes == system.expected_bytes
        assert len(system.kl_steps) == 19
        assert system.kl == pytest.approx(sum(system.kl_steps) / 19)
        assert system.ms_per_token > 0
    qevict, snap, kivi = result.systems[1:]
    assert qevict.share <= 0.51 and snap.share <= 0.51
    assert snap.fmm is not None and 0.0 < snap.fmm < 1.0 and snap.fmm == snap.fmm_fp_only
    assert kivi.fmm == 0.0 and kivi.fmm_fp_only is not None and kivi.fmm_fp_only > 0.3
    assert snap.budget is not None and snap.budget["share"] == 0.5
    assert kivi.budget is None
    assert (kivi.notices, snap.notices) == (["sinks_quantized"], [])
    assert kivi.full_tokens + kivi.quant_tokens == pytest.approx(1.0)
    kept = snap.bytes / result.systems[0].bytes
    assert snap.full_tokens == pytest.approx(kept) and snap.quant_tokens == 0.0


def test_system_by_itself_gives_the_same_divergence(loaded: LoadedModel, result: CompareResult) -> None:
    """What runs beside it does not change a system."""
    alone = compare(loaded, TEXT, [SystemChoice("snapkv", SMALL)], OPTIONS).systems[0]
    assert alone.kl_steps == pytest.approx(result.systems[2].kl_steps, abs=1e-6)
    assert alone.fmm == pytest.approx(result.systems[2].fmm)


def test_divergence_is_that_of_a_run_of_its_own(loaded: LoadedModel, result: CompareResult) -> None:
    """The shared prompt and the lockstep against a plain teacher-forced run of the same cache."""
    tokens, logits = _greedy(loaded, 20)
    cache = registry.make("snapkv", loaded, BudgetSpec(share=0.5), new_tokens=20, parameters=SMALL)
    ids = loaded.tokenizer(TEXT)["input_ids"]
    keyword = cache_keyword(loaded.model)
    with torch.inference_mode():
        loaded.model(torch.tensor([ids]), use_cache=True, **{keyword: cache})
        for number, token in enumerate(tokens[:-1]):
            own = loaded.model(torch.tensor([[token]]), use_cache=True, **{keyword: cache}).logits[0, -1]
            truth = logits[number + 1].log_softmax(-1)
            want = float((truth.exp() * (truth - own.log_softmax(-1))).sum())
            assert result.systems[2].kl_steps[number] == pytest.approx(want, abs=1e-4)


def test_future_missed_mass_is_that_of_the_models_attention(loaded: LoadedModel, result: CompareResult) -> None:
    tokens = result.token_ids
    ids = torch.tensor([loaded.tokenizer(TEXT)["input_ids"] + tokens[:-1]])
    before = loaded.model.config._attn_implementation
    loaded.model.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = loaded.model(ids, output_attentions=True).attentions
    loaded.model.set_attn_implementation(before)
    prompt = result.prompt_tokens
    cache = registry.make("snapkv", loaded, BudgetSpec(share=0.5), new_tokens=20, parameters=SMALL)
    with torch.inference_mode():
        loaded.model(ids[:, :prompt], use_cache=True, **{cache_keyword(loaded.model): cache})
    cache.settle()
    evicted = (cache.residency() == Tier.EVICTED).repeat_interleave(3, 1)
    future = torch.stack([probs[0, :, prompt : prompt + 32, :prompt].sum(1) for probs in attentions])
    want = float(((future * evicted).sum(-1) / future.sum(-1)).mean())
    first = result.systems[2].future[0]
    assert first.columns == prompt and first.steps == 19
    assert first.fmm == pytest.approx(want, rel=1e-4)


def test_frames_show_shares_of_windows(result: CompareResult) -> None:
    frames = result.systems[2].frames
    assert [shot.columns for shot in frames] == [
        result.prompt_tokens,
        result.prompt_tokens + 8,
        result.prompt_tokens + 16,
    ]
    assert frames[0].full.shape[0] == 4, "heads differ: one row each"
    assert set(np.unique(frames[0].full)) - {0, 255}, "tokens, not windows, are evicted"
    assert result.systems[0].frames[0].full.min() == 255
    quant = result.systems[3].frames[-1].quant
    assert quant[:, 0].min() == 255 and quant[:, -1].max() == 0


def test_order_of_events(loaded: LoadedModel) -> None:
    events = list(iter_compare(loaded, TEXT, ["streamingllm"], OPTIONS))
    assert isinstance(events[0], Progress) and isinstance(events[-1], CompareResult)
    steps = [event for event in events if isinstance(event, CompareStep)]
    assert [step.step for step in steps] == list(range(19))
    assert [step.token_id for step in steps] == events[-1].token_ids[1:]
    json.dumps(events[-1].to_dict())


def test_free_running(loaded: LoadedModel) -> None:
    options = CompareOptions(mode="free", budget=BudgetSpec(share=0.5), max_new_tokens=20, chat=False)
    out = compare(loaded, TEXT, ["fullkv", SystemChoice("snapkv", SMALL)], options)
    tokens, _ = _greedy(loaded, 20)
    full, snap = out.systems
    assert out.token_ids == full.token_ids == tokens
    assert full.first_difference is None and full.kl is None
    at = snap.first_difference
    assert at is not None
    assert snap.token_ids[:at] == tokens[:at] and snap.token_ids[at] != tokens[at]
    assert snap.text == loaded.tokenizer.decode(snap.token_ids)
    for system in out.systems:
        looks = range(0, len(system.token_ids), 8)
        assert [shot.columns for shot in system.frames] == [out.prompt_tokens + seen for seen in looks]
        assert "".join(system.pieces) == system.text and len(system.pieces) == len(system.token_ids)
    assert all((shot.full == 255).all() and (shot.sink == [255, 0]).all() for shot in full.frames)
    assert any((shot.full < 255).any() for shot in snap.frames)


def test_a_window_that_must_shrink_is_named(loaded: LoadedModel) -> None:
    """Where the window would take the whole budget, every method of its kind would keep the same."""
    options = CompareOptions(budget=BudgetSpec(tokens=60), max_new_tokens=20, chat=False)
    assert compare(loaded, TEXT, ["snapkv"], options).systems[0].notices == ["window_shrunk"]


def test_matched_to_a_quantizer(loaded: LoadedModel) -> None:
    choices = [SystemChoice("kivi-4", {"residual": 32}), SystemChoice("qevict", match_to="kivi-4")]
    kivi, qevict = compare(loaded, TEXT, choices, OPTIONS).systems
    assert 0.85 * kivi.bytes < qevict.bytes <= kivi.bytes * 1.01


def test_stopping_keeps_what_there_is(loaded: LoadedModel) -> None:
    seen: list[int] = []

    def stop() -> bool:
        seen.append(1)
        return len(seen) > 6

    events = list(iter_compare(loaded, TEXT, ["streamingllm"], OPTIONS, should_stop=stop))
    out = events[-1]
    assert isinstance(out, CompareResult) and out.stopped
    assert 0 < len(out.systems[0].kl_steps) < 19
    early = list(iter_compare(loaded, TEXT, ["streamingllm"], OPTIONS, should_stop=lambda: True))[-1]
    assert isinstance(early, CompareResult) and early.stopped


def test_no_hook_is_left_behind(loaded: LoadedModel) -> None:
    run = iter_compare(loaded, TEXT, ["streamingllm"], OPTIONS)
    while not isinstance(next(run), CompareStep):
        pass
    run.close()
    assert not any(module._forward_pre_hooks for module in loaded.model.modules())


def test_mistakes_show_before_any_work(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="1 to 8 systems"):
        compare(loaded, TEXT, [], OPTIONS)
    with pytest.raises(ConfigError, match="unknown system"):
        compare(loaded, TEXT, ["nothing"], OPTIONS)
    with pytest.raises(PromptError):
        compare(loaded, " ", ["fullkv"], OPTIONS)
    with pytest.raises(BudgetError, match="smallest"):
        compare(loaded, TEXT, ["snapkv"], CompareOptions(budget=BudgetSpec(share=0.05), max_new_tokens=40))
    for wrong in ({"mode": "other"}, {"horizon": 12}, {"max_new_tokens": 0}):
        with pytest.raises(ConfigError):
            CompareOptions(**wrong)  # type: ignore[arg-type]


def test_churn_counts_what_changed_among_known_positions() -> None:
    full, gone = int(Tier.FULL), int(Tier.EVICTED)
    before = torch.tensor([[[full, full, gone, full]]])
    after = torch.tensor([[[full, gone, full, full, full]]])
    assert churn(before, after) == pytest.approx(1 - 2 / 4)
    assert churn(before, before) == 0.0
    assert churn(torch.full((1, 1, 3), gone), torch.full((1, 1, 3), gone)) == 0.0


def test_equal_sets_are_told(loaded: LoadedModel) -> None:
    """Two methods that keep the same tokens are not two results."""
    gone, full = torch.full((1, 1, 3), int(Tier.EVICTED)), torch.full((1, 1, 3), int(Tier.FULL))
    half = torch.tensor([[[int(Tier.EVICTED), int(Tier.FULL), int(Tier.FULL)]]])
    assert same_sets([full, full, half]) == []
    assert same_sets([half, full, gone, half.clone()]) == [0, 3]
    choices = [SystemChoice("snapkv", SMALL), SystemChoice("criticalkv", SMALL | {"first_share": 1.0}), "streamingllm"]
    snap, critical, streaming = compare(loaded, TEXT, choices, OPTIONS).systems
    assert snap.notices == critical.notices == ["same_set"] and streaming.notices == []


def test_frame_of_token_granular_residency() -> None:
    table = torch.full((1, 2, 11), int(Tier.EVICTED), dtype=torch.uint8)
    table[0, 0, 1:3], table[0, 1, 5:9] = int(Tier.FULL), int(Tier.QUANT)
    shot = frame(table, 1, 4)
    assert shot.full.tolist() == [[128, 0, 0], [0, 0, 0]]
    assert shot.quant.tolist() == [[0, 0, 0], [0, 255, 0]]
    assert shot.sink.tolist() == [[0, 0], [0, 0]]


def test_frame_of_the_first_tokens() -> None:
    table = torch.full((2, 2, 9), int(Tier.EVICTED), dtype=torch.uint8)
    table[0, :, :5] = int(Tier.FULL)
    table[1, 0, :2], table[1, 0, 2:4] = int(Tier.FULL), int(Tier.QUANT)
    shot = frame(table, 5, 4)
    assert shot.sink.tolist() == [[255, 0], [255, 0], [102, 102], [0, 0]]
    assert shot.full.shape == (4, 1)
    alike = frame(table[:, :1].expand(2, 2, 9), 5, 4)
    assert alike.sink.tolist() == [[255, 0], [102, 102]]
    assert frame(table, 0, 4).sink.tolist() == [[0, 0]] * 4


def test_future_masses_by_hand() -> None:
    masses = FutureMasses(1, 2, 1, systems=1, horizon=4, block=2, device=torch.device("cpu"))
    table = torch.tensor([[[int(Tier.FULL), int(Tier.EVICTED), int(Tier.QUANT)]]], dtype=torch.uint8)
    masses.boundary([table])
    rows = torch.tensor([[0.5, 0.2, 0.1, 0.2], [0.1, 0.1, 0.4, 0.4]])
    for _ in range(2):
        masses.add(0, rows)
    later = torch.full((1, 1, 5), int(Tier.FULL), dtype=torch.uint8)
    masses.boundary([later])
    for _ in range(2):
        masses.add(0, torch.nn.functional.pad(rows, (0, 1)))
    masses.finish()
    first, second = masses.closed[0]
    assert (first.columns, first.steps, second.steps) == (3, 4, 2)
    assert first.fmm == pytest.approx((0.2 / 0.8 + 0.1 / 0.6) / 2)
    assert first.fp_only == pytest.approx((0.3 / 0.8 + 0.5 / 0.6) / 2)
    assert second.fmm == 0.0


def test_sliding_layers_beside_managed_ones() -> None:
    """gemma2: half of the layers keep their own sliding cache, in every system alike."""
    loaded = tiny_loaded("gemma2", head_dim=32)
    ids = loaded.tokenizer(TEXT)["input_ids"]
    out = compare(loaded, TEXT, ["fullkv", SystemChoice("snapkv", SMALL)], OPTIONS)
    cache, fed, tokens = DynamicCache(config=loaded.model.config), ids, []
    with torch.inference_mode():
        for _ in range(20):
            logits = loaded.model(torch.tensor([fed]), use_cache=True, **{cache_keyword(loaded.model): cache}).logits
            tokens.append(int(logits[0, -1].argmax()))
            fed = tokens[-1:]
    assert out.token_ids == tokens
    full, snap = out.systems
    assert full.kl == pytest.approx(0.0, abs=1e-6) and len(full.output_error) == 2
    assert snap.kl is not None and snap.kl > 0.0
