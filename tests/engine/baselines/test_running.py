"""A budget that grows with the sequence: met at every step, by the systems whose storage can follow."""

from __future__ import annotations

import pytest
import torch

from engine.baselines import registry
from engine.baselines.base import RunPlan
from engine.baselines.matching import BudgetSpec
from engine.budget import KVShape
from engine.compare import CompareOptions, SystemChoice, compare
from engine.errors import BudgetError, ConfigError
from engine.trace import Tier
from tests.engine.baselines.matrix import build, feed, follow, loaded, plan, prompt, settings

RUNNING = BudgetSpec(share=0.5, reference="running")
FOLLOW = [info.name for info in registry.systems() if info.budgeted and info.grows]
SETTLED = [info.name for info in registry.systems() if info.budgeted and not info.grows and not info.needs_reference]
TOKENS = 216


def test_who_can_follow() -> None:
    assert {"streamingllm", "h2o", "qevict", "qevict-r2", "qevict-r4"} <= set(FOLLOW)
    assert {"snapkv", "adakv", "criticalkv", "defensivekv", "layer-defensivekv", "random"} <= set(SETTLED)


@pytest.mark.parametrize("system", [*FOLLOW, "streamingllm original"])
def test_bytes_stay_within_the_share_of_every_step(system: str) -> None:
    model = loaded()
    cache = build(system, RUNNING)
    name, parameters = settings(system)
    rival, run = registry.rival(name, parameters), plan(model, RUNNING)
    feed(model, cache, prompt(1, TOKENS))
    sizes = []
    for step in range(40):
        feed(model, cache, prompt(1, 1, step), start=TOKENS + step)
        columns = TOKENS + step + 1
        assert cache.persistent_bytes <= 0.5 * cache.kv_shape.full_kv_bytes(columns), columns
        assert cache.persistent_bytes == rival.account(cache.kv_shape, TOKENS, step + 1, run), columns
        sizes.append(cache.persistent_bytes)
    assert sizes == sorted(sizes) and sizes[-1] > sizes[0], "it grows with the sequence"
    assert sizes[-1] > 0.8 * 0.5 * cache.kv_shape.full_kv_bytes(TOKENS + 40)


# R3's Full tier alone counts codes as gone, and those come back.
@pytest.mark.parametrize("system", [*(name for name in FOLLOW if "fp-only" not in name), "streamingllm original"])
def test_what_was_dropped_stays_dropped(system: str) -> None:
    model = loaded()
    cache = build(system, BudgetSpec(share=0.5 if system == "qevict-r4" else 0.35, reference="running"))
    feed(model, cache, prompt(1, TOKENS))
    before = None
    for step in range(30):
        feed(model, cache, prompt(1, 1, step), start=TOKENS + step)
        gone = cache.residency() == Tier.EVICTED
        if before is not None:
            assert bool(gone[:, :, : before.shape[2]][before].all())
        before = gone
    # Codes are so cheap beside float32 that nothing need be evicted where codes only gather.
    assert before is not None and (bool(before.any()) or system == "qevict-no-promotion")


@pytest.mark.parametrize("positions", ["cache", "original"])
def test_a_growing_ring_holds_the_latest_tokens(positions: str) -> None:
    """After every step: sinks and the last tokens in one piece, with the very keys that FullKV has in layer 0."""
    model = loaded()
    parameters = {"positions": positions}
    cache = registry.make("streamingllm", model, RUNNING, new_tokens=8, parameters=parameters)
    full = build("fullkv")
    ids, pads = prompt(2, TOKENS), [0, 11]
    for one in (cache, full):
        feed(model, one, ids, pads)
    for step in range(30):
        token = prompt(2, 1, step)
        for one in (cache, full):
            feed(model, one, token, pads, TOKENS + step)
        columns = TOKENS + step + 1
        held = int(0.5 * columns - 4 / (2 * 2 * 32 * 4 * 2) + 1e-9)
        for row, pad in enumerate(pads):
            latest = columns - (held - 4)
            want = [*range(pad, pad + 4), *range(max(latest, pad + 4), columns)]
            ring = cache.residents[0]
            assert (ring.residency(columns)[row, 0] == Tier.FULL).nonzero().flatten().tolist() == want
            value = full.residents[0].dense(row)[1][1]
            own = ring.dense(row)[1][1]
            place = torch.tensor(want) - pad
            assert torch.equal(own.sort(dim=0).values, value[place].sort(dim=0).values)


@pytest.mark.parametrize("system", FOLLOW)
def test_rows_and_padding_as_ever(system: str) -> None:
    model = loaded()
    ids, later, pads = prompt(2, TOKENS), prompt(2, 20, 1), [0, 9]
    budget = BudgetSpec(share=0.65, reference="running")
    together = follow(model, build(system, budget), ids, later, pads)
    for row, pad in enumerate(pads):
        alone = follow(model, build(system, budget), ids[row : row + 1], later[row : row + 1], [pad])
        torch.testing.assert_close(alone, together[row : row + 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("system", SETTLED)
def test_a_system_that_settles_at_the_prompts_end_refuses(system: str) -> None:
    with pytest.raises(ConfigError, match="can't follow a running budget: what it holds is settled"):
        build(system, RUNNING)


def test_only_a_share_can_grow() -> None:
    for wrong in ({"tokens": 50}, {"total_bytes": 10_000}):
        with pytest.raises(ConfigError, match="must be a share"):
            BudgetSpec(**wrong, reference="running")


def test_the_smallest_running_share_is_named() -> None:
    shape = KVShape(30, 3, 64, 2)
    for name in ("streamingllm", "h2o", "qevict"):
        with pytest.raises(BudgetError) as caught:
            registry.rival(name).account(shape, 500, 0, RunPlan(BudgetSpec(share=0.001, reference="running"), 100))
        enough = BudgetSpec(share=caught.value.smallest_share, reference="running")
        assert registry.rival(name).account(shape, 500, 0, RunPlan(enough, 100)) > 0


def test_a_comparison_at_a_running_budget() -> None:
    text = "A tide table is a short story about the moon. " * 5
    options = CompareOptions(budget=RUNNING, max_new_tokens=30, chat=False, ignore_eos=True)
    kivi = SystemChoice("kivi-4", {"residual": 32})
    result = compare(loaded(), text, ["qevict", "streamingllm", "h2o", kivi], options)
    full = result.full_kv_bytes
    for system in result.systems[:3]:
        assert system.bytes == system.expected_bytes <= 0.5 * full
        assert system.budget is not None and system.budget["share"] == 0.5
    assert result.systems[3].budget is None
    with pytest.raises(ConfigError, match="snapkv can't follow"):
        compare(loaded(), text, ["qevict", "snapkv"], options)
    with pytest.raises(ConfigError, match="oracle-past can't follow"):
        compare(loaded(), text, ["qevict", "oracle-past"], options)
