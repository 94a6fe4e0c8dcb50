"""Scores: deferred against materialised, mass conservation, rankers, prompt chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.config import QEvictConfig
from engine.scores import Ranker, group_mean, key_masses, prompt_column_masses
from tests.engine.drive import BACKENDS, Drive

BASE: dict[str, Any] = {
    "window_size": 4,
    "sink_tokens": 3,
    "local_tokens": 8,
    "kv_budget": 0.5,
    "planned_new_tokens": 60,
}


def pair(seed: int, steps: list[int], drive_args: dict[str, Any] | None = None, **changes: Any) -> tuple[Drive, Drive]:
    """The same run with scores taken in the step and with deferred scores."""
    made = []
    for backend in ("eager", "sdpa"):
        config = QEvictConfig(**{**BASE, **changes, "backend": backend})
        made.append(Drive(config, seed=seed, **(drive_args or {})).run(steps))
    assert made[0].cache.parts[0].backend.scores_in_step and not made[1].cache.parts[0].backend.scores_in_step
    return made[0], made[1]


@pytest.mark.parametrize("changes", [{}, {"bits": 4}, {"score_scope": "kv_head"}, {"ranker": "decayed"},
                                     {"ranker": "p_norm"}, {"routing_interval": 8}, {"quant_share": 1.0},
                                     {"kv_dtype": "bfloat16"}, {"value_group_size": 4}])  # fmt: skip
@pytest.mark.parametrize("pads", [(0,), (9, 0, 2)])
def test_deferred_scores_equal_materialised_ones(changes: dict[str, Any], pads: tuple[int, ...]) -> None:
    """At every event, for every window that competes; the tiers too."""
    eager, sdpa = pair(11, [50, *[1] * 30, 7, *[1] * 9], {"pads": pads, "groups": 3}, **changes)
    assert len(eager.records) == len(sdpa.records) > 5
    for mine, theirs in zip(eager.records, sdpa.records, strict=True):
        torch.testing.assert_close(mine.scores, theirs.scores, atol=1e-5, rtol=1e-4)
        assert torch.equal(mine.after, theirs.after)
    for mine, theirs in zip(eager.outputs, sdpa.outputs, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-3)


def test_attention_mass_is_conserved() -> None:
    """Nothing evicted: all scores of a row, sink and local included, sum to the number of queries."""
    for backend in BACKENDS:
        drive = Drive(QEvictConfig(**{**BASE, "kv_budget": 1.0, "backend": backend}), seed=1).run([30, *[1] * 21])
        assert drive.columns == 51 and drive.records[-1].columns == 51
        store = drive.cache.state.pool
        total = store.arena_scores.sum(1)
        torch.testing.assert_close(total, torch.full_like(total, 51.0), atol=1e-3, rtol=0)


def test_a_local_window_brings_its_scores_along() -> None:
    """A window that ages counts what it collected while it was local, prompt queries included."""
    drive = Drive(QEvictConfig(**BASE, backend="eager"), seed=1).run([31, 1])
    local = drive.records[0].after[0].tolist().index(1)
    view = drive.rows()[0]
    collected = float(view.store.arena_scores[0, view.arena[local]])
    assert collected > 0.1
    while not any(float(r.scores[0, local]) for r in drive.records if r.scores.shape[1] > local):
        drive.step(1)
    aged = next(r for r in drive.records if float(r.scores[0, local]))
    assert float(aged.scores[0, local]) >= collected


def test_scores_follow_a_window_between_tiers() -> None:
    """Cumulative scores never fall, wherever the window is."""
    drive = Drive(QEvictConfig(**{**BASE, "quant_share": 0.5}, backend="sdpa"), seed=3, spread=2.0).run([50, *[1] * 50])
    moved = 0
    for earlier, later in zip(drive.records, drive.records[1:], strict=False):
        width = earlier.scores.shape[1]
        both = (earlier.scores > 0) & (later.scores[:, :width] > 0)
        assert bool((later.scores[:, :width][both] >= earlier.scores[both] - 1e-6).all())
        moved += int((both & (earlier.after != later.after[:, :width])).sum())
    assert moved > 5


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("power", [1.0, 2.0])
def test_key_masses_equal_probabilities(softcap: float | None, power: float) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 6, 5, 16), torch.randn(2, 3, 9, 16)
    logits = torch.einsum("bhtd,bhkd->bhtk", query.double(), key.double().repeat_interleave(2, 1)) * 0.25
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    weights = torch.tensor([0.5, 1.0, 0.0, 2.0, 1.0])
    got = key_masses(query, key, logits.logsumexp(-1).float(), scale=0.25, softcap=softcap,
                     visible=torch.ones(1, 1, 5, 9, dtype=torch.bool), weights=weights, power=power)  # fmt: skip
    wanted = torch.einsum("t,bhtk->bhk", weights.double(), logits.softmax(-1) ** power)
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("first_valid", [0, 70])
def test_prompt_masses_come_in_chunks(first_valid: int) -> None:
    """Longer than one chunk of queries; later columns and padding get nothing."""
    torch.manual_seed(0)
    tokens = 600
    query, key = torch.randn(1, 4, tokens, 16), torch.randn(1, 2, tokens, 16)
    logits = query.double() @ key.double().repeat_interleave(2, 1).transpose(-1, -2) * 0.25
    at = torch.arange(tokens)
    seen = (at[None] <= at[:, None]) & (at[None] >= first_valid)
    logits = logits.masked_fill(~seen, -torch.inf)
    probs = logits.softmax(-1).nan_to_num(0.0)
    got = prompt_column_masses(query, key, logits.logsumexp(-1).float(), scale=0.25, softcap=None, query_start=0,
                               key_start=0, first_valid=first_valid, weights=None, power=1.0)  # fmt: skip
    torch.testing.assert_close(got.double(), probs[0].sum(1), atol=1e-4, rtol=1e-4)
    assert bool((got[:, :first_valid] == 0).all())


def test_the_mean_runs_over_the_heads_of_the_decision() -> None:
    masses = torch.arange(8.0).reshape(1, 4, 2)
    assert group_mean(masses, 1).tolist() == [[3.0, 4.0]]
    assert group_mean(masses, 2).tolist() == [[1.0, 2.0], [5.0, 6.0]]


def test_a_half_life_halves() -> None:
    ranker = Ranker(QEvictConfig(ranker="decayed", decay_half_life=10.0))
    weights = ranker.query_weights(11, torch.device("cpu"))
    assert weights is not None
    assert float(weights[-1]) == 1.0 and float(weights[0]) == pytest.approx(0.5)
    assert Ranker(QEvictConfig()).query_weights(11, torch.device("cpu")) is None


def test_key_norm_prefers_what_its_sign_says() -> None:
    key = torch.stack([torch.full((2, 4, 16), 1.0), torch.full((2, 4, 16), 2.0)])
    small = Ranker(QEvictConfig(ranker="key_norm", key_norm_sign=-1)).key_scores(key)
    large = Ranker(QEvictConfig(ranker="key_norm", key_norm_sign=1)).key_scores(key)
    assert small[0] > small[1] and large[1] > large[0]
    assert float(large[0]) == pytest.approx(4.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunks", [[50], [30, 20], [46, 4], [2] * 25])
def test_the_last_n_queries_do_not_depend_on_chunks(backend: str, chunks: list[int]) -> None:
    config = QEvictConfig(**BASE, backend=backend, prefill_queries=6)
    whole = Drive(config, seed=1)
    prompt = whole.draw(50)
    whole.feed(prompt)
    whole.step(1)
    parts = Drive(config, seed=1)
    at = 0
    for chunk in chunks:
        parts.feed([tuple(x[:, :, at : at + chunk] for x in layer) for layer in prompt])  # type: ignore[misc]
        at += chunk
    parts.feed(whole.seen[1])
    torch.testing.assert_close(parts.records[0].scores, whole.records[0].scores, atol=1e-5, rtol=1e-4)
    assert float(whole.records[0].scores.sum(1).max()) <= 6.001
    assert torch.equal(parts.records[0].after, whole.records[0].after)


def test_scoring_workspace_is_reported() -> None:
    eager, sdpa = pair(1, [30, 1, 1])
    assert eager.cache.scoring_bytes == 0
    ring = 2 * 4 * 4 * 16 * 4 + 2 * 4 * 4 * 4  # layers · heads · Ω · (d + lse) · float32
    assert sdpa.cache.scoring_bytes == ring
    assert eager.cache.plan == sdpa.cache.plan


def test_key_norm_needs_no_attention_and_no_ring() -> None:
    drive = Drive(QEvictConfig(**BASE, backend="sdpa", ranker="key_norm"), seed=1).run([30, *[1] * 9])
    assert drive.cache.scoring_bytes == 0
    assert not drive.cache.parts[0].backend.scores_in_step


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"ranker": "cumulative"}, [1.0, 0.6, 0.4]),
        ({"ranker": "decayed", "decay_half_life": 1.0}, [0.7, 0.5, 0.3]),
        ({"ranker": "p_norm", "norm_p": 2.0}, [0.547723**2, 0.316228**2, 0.2**2]),
    ],
)
def test_rankers_on_two_steps_and_three_windows_by_hand(changes: dict[str, Any], want: list[float]) -> None:
    """Steps .4 .2 .1 .1 .1 .1 and .3 .1 .2 .2 .1 .1, windows of two tokens; a half-life of one step is γ = .5."""
    ranker = Ranker(QEvictConfig(**changes))
    probs = torch.tensor([[0.4, 0.2, 0.1, 0.1, 0.1, 0.1], [0.3, 0.1, 0.2, 0.2, 0.1, 0.1]])
    masses = key_masses(
        torch.eye(2)[None, None],
        probs.log().T[None, None],
        torch.zeros(1, 1, 2),
        scale=1.0,
        softcap=None,
        visible=torch.ones(1, 1, 2, 6, dtype=torch.bool),
        weights=ranker.query_weights(2, torch.device("cpu")),
        power=ranker.power,
    )
    windows = group_mean(masses, 1).view(3, 2).sum(1)
    torch.testing.assert_close(windows, torch.tensor(want), atol=1e-6, rtol=1e-5)
