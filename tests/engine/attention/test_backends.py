"""All backends on the same inputs, the joint softmax, and clear errors for those that cannot run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.attention import make_backend, unavailable
from engine.attention.softmax import NO_KEYS, attend, merge
from engine.config import BACKENDS, QEvictConfig
from engine.errors import BackendError
from engine.scores import Ranker
from tests.engine.drive import BACKENDS as HERE
from tests.engine.drive import Drive

BASE: dict[str, Any] = {
    "window_size": 8,
    "sink_tokens": 5,
    "local_tokens": 8,
    "kv_budget": 0.5,
    "planned_new_tokens": 40,
}
FAST = [name for name in HERE if name != "eager"]
STEPS = [83, *[1] * 20, 11, *[1] * 7]


def naive(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, causal: bool,
          softcap: float | None) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    groups = query.shape[1] // key.shape[1]
    logits = query.double() @ key.double().repeat_interleave(groups, 1).transpose(-1, -2) * 0.25
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + (bias if bias.shape[1] == 1 else bias.repeat_interleave(groups, 1)).double()
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return logits.softmax(-1) @ value.double().repeat_interleave(groups, 1), logits.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    "tokens, causal, hidden, per_head",
    [
        (1, False, 0, False),
        (1, False, 5, False),
        (1, False, 5, True),
        (6, False, 3, True),
        (6, False, 3, False),
        (12, True, 0, False),
    ],
)
@pytest.mark.parametrize("groups", [1, 3])
def test_attention_and_its_log_sum_exp(
    groups: int, tokens: int, causal: bool, hidden: int, per_head: bool, softcap: float | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 2 * groups, tokens, 16).to(dtype)
    key, value = torch.randn(2, 2, 12, 16).to(dtype), torch.randn(2, 2, 12, 16).to(dtype)
    bias = None
    if hidden:
        bias = torch.zeros(2, 2 if per_head else 1, 1, 12)
        bias[:, :, :, :hidden] = -1e30
        if per_head:
            bias[:, 1, :, hidden : hidden + 2] = -1e30
    out, lse = attend(query, key, value, scale=0.25, causal=causal, bias=bias, softcap=softcap)
    wanted, norm = naive(query, key, value, bias, causal, softcap)
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), norm, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_part_that_nobody_may_see_weighs_nothing(tokens: int, dtype: torch.dtype) -> None:
    """A wholly masked part merges away; in float16 the bias must not become -inf, nor the sum 0."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 4 if i == 0 else 2, tokens if i == 0 else 7, 16).to(dtype) for i in range(3))
    hidden = torch.full((1, 1, 1, 7), -1e30)
    seen = attend(query, key, value, scale=0.25)
    out, lse = merge([attend(query, key + 1, value * 50, scale=0.25, bias=hidden), seen])
    torch.testing.assert_close(out, seen[0])
    torch.testing.assert_close(lse, seen[1])
    out, lse = merge([attend(query, key[:, :, :0], value[:, :, :0], scale=0.25), seen])
    torch.testing.assert_close(out, seen[0])
    assert float(attend(query, key[:, :, :0], value[:, :, :0], scale=0.25)[1].max()) == pytest.approx(NO_KEYS)


@pytest.mark.parametrize("cuts", [[5, 7], [1, 1, 10], [12]])
def test_a_merge_of_parts_is_the_joint_softmax(cuts: list[int]) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, 3, 16) * 3, torch.randn(2, 2, 12, 16) * 3, torch.randn(2, 2, 12, 16)
    whole = attend(query, key, value, scale=0.25)
    parts = [attend(query, k, v, scale=0.25) for k, v in zip(key.split(cuts, 2), value.split(cuts, 2), strict=True)]
    out, lse = merge(parts)
    torch.testing.assert_close(out, whole[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, whole[1], atol=1e-5, rtol=1e-5)


SHAPES: list[dict[str, Any]] = [
    {},
    {"groups": 1},
    {"groups": 3, "kv_heads": 3},
    {"groups": 7, "kv_heads": 1},
    {"groups": 8},
    {"dim": 64},
    {"dim": 128, "groups": 4},
    {"pads": (0, 9, 33)},
    {"softcap": 2.0},
]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"bits": 4},
    {"quant_share": 0.0},
    {"quant_share": 1.0},
    {"score_scope": "kv_head"},
    {"kv_dtype": "float16"},
    {"kv_dtype": "bfloat16"},
    {"ranker": "decayed", "decay_half_life": 9.0},
    {"ranker": "p_norm"},
    {"ranker": "key_norm"},
    {"routing_interval": 16, "kv_budget": 0.7},
    {"window_size": 32, "local_tokens": 32, "kv_budget": 0.9},
    {"window_size": 16, "local_tokens": 16, "kv_budget": 0.7},
    {"prefill_queries": 9},
    {"age_normalised": True},
    {"promotion": False},
    {"prefill_routing": "chunk"},
]


def agree(changes: dict[str, Any], shape: dict[str, Any], backend: str) -> None:
    made = [Drive(QEvictConfig(**{**BASE, **changes}, backend=name), seed=8, **shape).run(STEPS)
            for name in ("eager", backend)]  # fmt: skip
    for step, (wanted, got) in enumerate(zip(made[0].outputs, made[1].outputs, strict=True)):
        for a, b in zip(wanted, got, strict=True):
            torch.testing.assert_close(b, a, atol=5e-5, rtol=1e-3, msg=lambda text, step=step: f"step {step}: {text}")
    for wanted, got in zip(made[0].records, made[1].records, strict=True):
        torch.testing.assert_close(got.scores, wanted.scores, atol=5e-5, rtol=2e-4)
        assert torch.equal(got.after, wanted.after)
    assert made[0].cache.plan == made[1].cache.plan, "capacities depend on the backend"
    assert any(bool((record.after == 3).any()) for record in made[0].records) or changes.get("quant_share") == 0.0


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backends_agree_on_every_shape(shape: dict[str, Any], backend: str) -> None:
    agree({}, shape, backend)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_backends_agree_on_every_setting(changes: dict[str, Any], backend: str) -> None:
    agree(changes, {}, backend)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("changes", SETTINGS[:10], ids=str)
def test_backends_agree_on_padded_batches_with_appends(changes: dict[str, Any], backend: str) -> None:
    agree(changes, {"pads": (17, 0, 3), "groups": 3}, backend)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("pads", [(0,), (17, 0)])
def test_backends_agree_in_half_precision(pads: tuple[int, ...], backend: str, dtype: torch.dtype) -> None:
    """Outputs within the dtype's own grain, where both decided the same."""
    made = [
        Drive(QEvictConfig(**BASE, backend=name), seed=8, dtype=dtype, pads=pads).run(STEPS)
        for name in ("eager", backend)
    ]
    assert all(torch.equal(a.after, b.after) for a, b in zip(made[0].records, made[1].records, strict=True))
    tolerance = {torch.float16: 6e-3, torch.bfloat16: 5e-2}[dtype]
    for wanted, got in zip(made[0].outputs, made[1].outputs, strict=True):
        for a, b in zip(wanted, got, strict=True):
            assert b.dtype == dtype and bool(b.isfinite().all())
            for row, pad in enumerate(pads):
                first = pad if a.shape[2] == STEPS[0] else 0
                torch.testing.assert_close(b[row, :, first:], a[row, :, first:], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_whose_arena_is_empty_sees_the_others_only(backend: str, dtype: torch.dtype) -> None:
    """No sink, few tokens, padding: an append finds one row with nothing in full precision."""
    config = QEvictConfig(window_size=8, sink_tokens=0, local_tokens=8, kv_budget=1.0, planned_new_tokens=40,
                          backend=backend)  # fmt: skip
    padded = Drive(config, pads=(9, 0), row_seeds=(1, 2), dtype=dtype).run([10, 1, 5, 1, 1, 7, 1])
    alone = Drive(config, pads=(0,), row_seeds=(1,), dtype=dtype)
    for step, tokens in zip(padded.seen, [10, 1, 5, 1, 1, 7, 1], strict=True):
        skip = 9 if tokens == 10 else 0
        alone.feed([tuple(x[:1, :, skip:] for x in layer) for layer in step])  # type: ignore[misc]
    tolerance = 5e-3 if dtype == torch.float16 else 2e-5
    for mine, theirs in zip(padded.outputs, alone.outputs, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a[:1, :, -b.shape[2] :], b, atol=tolerance, rtol=1e-2)


# ---- who can run ---------------------------------------------------------------------------------------------


def make(name: str, device: str = "cpu", dim: int = 64, **changes: Any) -> str:
    return make_backend(name, device, Ranker(QEvictConfig(**changes)), dim).name


def test_eager_and_sdpa_always_run() -> None:
    assert make("eager") == "eager" and make("sdpa") == "sdpa"
    assert make("sdpa", "cuda:0") == "sdpa"


def test_auto_takes_what_runs() -> None:
    wanted = "fused" if unavailable("fused", "cpu") is None else "sdpa"
    assert make("auto") == wanted
    assert make("auto", dim=20) == "sdpa"
    assert make("auto", value_group_size=4) == "sdpa"


def test_what_cannot_run_says_what_is_missing() -> None:
    with pytest.raises(BackendError, match="CUDA"):
        make("flash2")
    with pytest.raises(BackendError, match="head_dim"):
        make("fused", dim=20)
    with pytest.raises(BackendError, match="value_group_size"):
        make("fused", value_group_size=4)
    with pytest.raises(BackendError, match="unknown backend 'abacus'"):
        make("abacus")
    for name in BACKENDS:
        reason = unavailable(name, "cpu") if name != "auto" else None
        assert reason is None or (len(reason) > 20 and name in reason)
