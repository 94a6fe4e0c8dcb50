"""Scores by hand, and several systems on one item of a tiny model."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from engine.baselines import registry
from engine.baselines.matching import BudgetSpec
from engine.cache_layer import QEvictLayer
from engine.compare import CompareOptions, compare
from engine.errors import ConfigError, PromptError
from engine.evaluation.forcing import System, _groups, measure, score
from engine.evaluation.items import MAIN, Item, Span
from engine.prompt import prompt_ids
from tests.tiny import tiny_loaded

torch.set_num_threads(1)


def item_of(prompt: int = 200, forced: int = 12, seed: int = 0) -> Item:
    draw = torch.randint(0, 250, (prompt + forced,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Item("book", 0, prompt, tuple(draw[:prompt]), tuple(draw[prompt:]), {MAIN: Span(1, forced)})


def test_scores_by_hand() -> None:
    # Vocabulary of 3; forced tokens 0, 2, 1: rows predict token 1 (which is 2) and token 2 (which is 1).
    ours = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]]).log()
    truth = torch.tensor([[0.25, 0.25, 0.5], [0.1, 0.8, 0.1]]).log()
    item = Item("t", 0, 1, (0, 0), (0, 2, 1), {MAIN: Span(1, 3)}, choices=(2, 0))
    found = score(ours, truth, item, item.spans[MAIN])
    assert found.nll == pytest.approx(-(math.log(0.5) + math.log(0.3)) / 2)
    assert (found.exact, found.top1, found.agreement, found.choice) == (False, 0.5, 0.5, True)
    first = 0.25 * math.log(0.25 / 0.2) + 0.25 * math.log(0.25 / 0.3)
    second = 0.1 * math.log(0.1 / 0.6) + 0.8 * math.log(0.8 / 0.3)
    assert found.kl == pytest.approx((first + second) / 2, rel=1e-5)
    last = score(ours, truth, item, Span(2, 3))
    assert (last.top1, last.choice) == (0.0, False)


def test_output_error_by_hand() -> None:
    ours = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [0.2, 0.2, 0.6]]).log()
    item = Item("t", 0, 1, (0, 0), (0, 2, 1, 0), {MAIN: Span(2, 4)})
    # Two layers, three fed tokens; tokens 1 and 2 predict the span.
    errors = torch.tensor([[9.0, 0.2, 0.4], [9.0, 0.0, 0.2]])
    assert score(ours, ours, item, item.spans[MAIN], errors).output_error == pytest.approx(0.2)
    assert score(ours, ours, item, item.spans[MAIN]).output_error is None


def test_output_error_is_that_of_a_comparison() -> None:
    """Teacher-forced on FullKV's own tokens, a comparison and this measure the same error, layer by layer."""
    loaded = tiny_loaded(positions=512)
    item = item_of(seed=7)
    options = CompareOptions(
        budget=BudgetSpec(share=0.3), max_new_tokens=12, kv_dtype="float16", chat=False, ignore_eos=True
    )
    text = loaded.tokenizer.decode(item.prompt)
    prompt = prompt_ids(loaded, text, False)
    result = compare(loaded, text, ["qevict", "h2o"], options)
    forced = Item("book", 0, len(prompt), tuple(prompt), tuple(result.token_ids), {MAIN: Span(1, 12)})
    found = measure(loaded, forced, [System("qevict", 0.3), System("h2o", 0.3)])
    for outcome, system in zip(found, result.systems, strict=True):
        assert outcome.output_error_layers == pytest.approx(system.output_error, abs=2e-4)
        mean = sum(system.output_error) / len(system.output_error)
        assert outcome.scores[MAIN].output_error == pytest.approx(mean, abs=2e-4) and mean > 0.01


def test_qevict_at_a_quantizers_bytes() -> None:
    systems = [System("kivi-2"), System("qevict", match_to="kivi-2")]
    kivi, matched = measure(tiny_loaded(positions=512, head_dim=32), item_of(300), systems)
    assert matched.system.label == "qevict at kivi-2's bytes"
    assert matched.configuration["budget_bytes"] == kivi.bytes and kivi.configuration["budget_bytes"] is None
    assert 0.9 * kivi.bytes < matched.bytes <= kivi.bytes
    assert matched.configuration["window_size"] == 8 and kivi.configuration["residual"] == 128
    refused, beside = measure(tiny_loaded(positions=512), item_of(), systems)
    assert refused.infeasible is not None and beside.infeasible is not None and "group_size" in beside.infeasible


def test_a_system_that_keeps_everything_is_fullkv() -> None:
    systems = [System("fullkv"), System("qevict", 1.0, {"quant_share": 0.0}), System("snapkv", 1.0)]
    full, *others = measure(tiny_loaded(positions=512), item_of(), systems, kv_dtype="model")
    assert full.scores[MAIN].kl == 0.0 and full.share == 1.0 and full.scores[MAIN].output_error == 0.0
    for outcome in others:
        assert outcome.scores[MAIN].kl < 1e-6
        assert 0.0 <= (outcome.scores[MAIN].output_error or 0.0) < 1e-4
        assert outcome.scores[MAIN].nll == pytest.approx(full.scores[MAIN].nll, abs=1e-4)


def test_less_memory_is_further_from_fullkv_and_bytes_are_measured() -> None:
    systems = [
        System("qevict", 0.2),
        System("qevict", 0.6),
        System("streamingllm", 0.2),
        System("kivi-2", None, {"group_size": 16}),
    ]
    tight, loose, window, kivi = measure(tiny_loaded(positions=512), item_of(seed=3), systems)
    assert tight.scores[MAIN].kl > loose.scores[MAIN].kl > 0.0
    assert (tight.scores[MAIN].output_error or 0.0) > (loose.scores[MAIN].output_error or 0.0) > 0.0
    assert tight.share <= 0.2 * 212 / 211 and 0.4 < loose.share <= 0.6 * 212 / 211
    assert 0.15 < window.share <= 0.2 * 212 / 211
    assert kivi.bytes > 0


def test_an_infeasible_system_says_so_and_the_rest_runs() -> None:
    tiny, fine = measure(tiny_loaded(positions=512), item_of(), [System("qevict", 0.02), System("qevict", 0.3)])
    assert tiny.infeasible is not None and tiny.smallest_share is not None and not tiny.scores
    assert fine.infeasible is None and MAIN in fine.scores


def test_a_system_that_does_not_fit_the_model_says_so() -> None:
    (kivi,) = measure(tiny_loaded(positions=512), item_of(), [System("kivi-2")])
    assert kivi.infeasible is not None and "group_size" in kivi.infeasible and kivi.smallest_share is None
    with pytest.raises(ConfigError, match="unknown system"):
        measure(tiny_loaded(positions=512), item_of(), [System("no-such-system")])


def test_results_do_not_depend_on_the_company() -> None:
    loaded, item = tiny_loaded(positions=512), item_of(seed=5)
    (alone,) = measure(loaded, item, [System("qevict", 0.3)])
    _, together = measure(loaded, item, [System("h2o", 0.3), System("qevict", 0.3)])
    assert alone.scores[MAIN].nll == pytest.approx(together.scores[MAIN].nll, abs=1e-5)
    assert alone.bytes == together.bytes


def test_systems_side_by_side_are_as_each_alone() -> None:
    """Every system of the registry that fits, in one forward; a row must see its own cache and nothing else."""
    loaded, item = tiny_loaded(positions=512, head_dim=32), item_of(300, seed=2)
    points = [System(name, 0.4 if registry.rival(name).budgeted else None) for name in registry.names()]
    fits = [one for one in measure(loaded, item, points) if one.infeasible is None and one.system.name != "fullkv"]
    assert len(fits) > 12
    for beside in fits:
        (alone,) = measure(loaded, item, [beside.system])
        assert alone.bytes == beside.bytes and alone.backend == beside.backend
        ours, theirs = beside.scores[MAIN], alone.scores[MAIN]
        assert ours.nll == pytest.approx(theirs.nll, abs=1e-3), beside.system.label
        assert ours.kl == pytest.approx(theirs.kl, abs=1e-3) and ours.output_error == pytest.approx(
            theirs.output_error, abs=2e-3
        )
        assert beside.output_error_layers == pytest.approx(alone.output_error_layers, abs=4e-3)
        assert alone.ms_per_token is not None and beside.ms_per_token is None


def test_a_cache_with_stock_layers_is_decoded_alone() -> None:
    ours = SimpleNamespace(layers=[QEvictLayer.__new__(QEvictLayer)])
    stock = SimpleNamespace(layers=[QEvictLayer.__new__(QEvictLayer), object()])
    assert _groups([(0, ours), (1, stock), (2, ours)]) == [[(0, ours), (2, ours)], [(1, stock)]]
    assert _groups([(1, stock)]) == [[(1, stock)]] and _groups([]) == []


def test_wrong_items() -> None:
    with pytest.raises(PromptError, match="places"):
        measure(tiny_loaded(positions=128), item_of(), [System("fullkv")])
    with pytest.raises(PromptError, match="2 are needed"):
        measure(tiny_loaded(positions=128), item_of(prompt=1), [System("fullkv")])
