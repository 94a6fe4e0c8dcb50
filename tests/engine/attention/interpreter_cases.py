"""The Triton kernels against the float32 twin, in Triton's interpreter: `test_triton.py` runs this file with
TRITON_INTERPRET=1 in a process of its own, because Triton reads that switch when it is imported."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs with TRITON_INTERPRET=1, from test_triton.py", allow_module_level=True)

from engine.attention import fused_cuda, triton_columns
from engine.attention.eager import EagerBackend
from engine.attention.flash2_cuda import Flash2Backend
from engine.attention.flash_arena import PackageKernel, torch_kernel
from engine.attention.fused_cuda import FusedCudaBackend
from engine.attention.sdpa import SdpaBackend
from engine.attention.softmax import attend
from engine.attention.state import KVState
from engine.benchmarks.attention import HeadShape, filled_state
from engine.config import QEvictConfig
from engine.rope import RopeTable
from engine.scores import Ranker, group_mean, prompt_column_masses
from tests.engine.drive import Drive

torch.set_num_threads(1)


class Rotary(torch.nn.Module):
    """Frequencies of the first `dim` channels, as a model with partial rotation has them."""

    def __init__(self, dim: int, scaling: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        self.attention_scaling = scaling


@dataclass(frozen=True)
class Case:
    group: int = 3
    kv_heads: int = 2
    dim: int = 64
    bits: int = 2
    window: int = 8
    stored: torch.dtype = torch.float32
    query: torch.dtype = torch.float32
    rotary: int | None = None
    softcap: float | None = None
    pads: tuple[int, ...] = (0,)
    scope: str = "layer"
    value_group: int | None = None
    splits: tuple[int, int] = (2, 2)
    context: int = 200
    budget: float = 0.6
    ranker: str = "cumulative"

    @property
    def config(self) -> QEvictConfig:
        return QEvictConfig(
            kv_budget=self.budget,
            window_size=self.window,
            bits=self.bits,
            sink_tokens=5,
            local_tokens=2 * self.window,
            value_group_size=self.value_group,
            score_scope=self.scope,
            kv_dtype=str(self.stored).removeprefix("torch."),
            ranker=self.ranker,
        )

    def state(self, seed: int) -> KVState:
        torch.manual_seed(seed)
        shape = HeadShape("test", self.group * self.kv_heads, self.kv_heads, self.dim)
        state = filled_state(shape, self.config, self.context, len(self.pads), 1, self.stored)
        if self.rotary is not None:
            state.rope = RopeTable(Rotary(self.rotary, 1.25), None, torch.device("cpu"))
            state.rope.ensure(self.context)
        state.pads, state.shift = list(self.pads), torch.tensor(self.pads)
        state.refresh()
        if any(self.pads):
            state.place = (-1, state.place[1])
            keep_windows_clear_of_padding(state)
        spoil(state)
        assert state.live_used > 0
        return state


def keep_windows_clear_of_padding(state: KVState) -> None:
    """No window of the Quant tier reaches into the padding: others take the place of those that do."""
    store, window = state.pool, state.config.window_size
    for row, pad in enumerate(state.rows(torch.tensor(state.pads)).tolist()):
        low = -(-(pad + state.grid.offset) // window)
        taken = {*store.arena_ids[row].tolist(), *store.ledger_ids[row].tolist()}
        free = [block for block in range(low, state.grid.num_blocks(state.columns) - 1) if block not in taken]
        ids = store.ledger_ids[row].tolist()
        store.ledger_ids[row] = torch.tensor([free.pop() if 0 <= block < low else block for block in ids])


def spoil(state: KVState) -> None:
    """Puts NaN where nothing lies: it must never reach a result."""
    store = state.pool
    for row, count in enumerate(store.arena_count.tolist()):
        store.arena_key[row, :, count:] = torch.nan
        store.arena_value[row, :, count:] = torch.nan
    for row, count in enumerate(store.live_count.tolist()):
        for lane in range(count, store.ledger_ids.shape[1]):
            store.key_scale[row, :, lane // 16, :, lane % 16] = torch.nan
            store.value_scale[row, :, lane // 16, :, :, lane % 16] = torch.nan
            store.value_zero[row, :, lane // 16, :, :, lane % 16] = torch.nan


def clean(state: KVState) -> KVState:
    """The same state for the reference, which multiplies what lies there by 0."""
    twin = copy.deepcopy(state)
    for tensor in twin.pool.persistent_tensors().values():
        if tensor.is_floating_point():
            tensor.nan_to_num_(0.0)
    return twin


def both(
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    seed: int = 0,
    make: Callable[[Ranker], FusedCudaBackend] = FusedCudaBackend,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(kernel's, twin's) output, scores and newest key."""
    monkeypatch.setattr(fused_cuda, "splits", lambda *given: case.splits)
    monkeypatch.setattr(fused_cuda, "most_splits", lambda *given: max(case.splits))
    state = case.state(seed)
    twin = clean(state)
    batch = len(case.pads)
    query = torch.randn(batch, case.group * case.kv_heads, 1, case.dim).to(case.query)
    # Rounded to what is stored beforehand: the interpreter cuts digits off where a device rounds.
    size = (batch, case.kv_heads, 1, case.dim)
    key, value = (torch.randn(size).to(case.stored).to(case.query) for _ in range(2))
    ranker = Ranker(case.config)
    call: dict[str, Any] = {"scale": case.dim**-0.5, "softcap": case.softcap}
    out, lse = make(ranker).decode(state, 0, query, key, value, **call)
    if lse is None:
        want, _ = EagerBackend().decode(twin, 0, query.float(), key, value, **call)
        found = {"out": (out, want)}
    else:
        want, want_lse = SdpaBackend().decode(twin, 0, query.float(), key, value, **call)
        assert want_lse is not None
        found = {"out": (out, want), "lse": (lse, want_lse)}
    mine, theirs = state.pool, twin.pool
    found["arena"] = (mine.arena_scores, theirs.arena_scores)
    found["ledger"] = (mine.ledger_scores, theirs.ledger_scores)
    found["key"] = (mine.arena_key.nan_to_num(0.0), theirs.arena_key)
    found["value"] = (mine.arena_value.nan_to_num(0.0), theirs.arena_value)
    return found


def named(name: str) -> Callable[[str], str]:
    """Puts a name before what differs."""
    return lambda text: f"{name}: {text}"


EXACT = (
    Case(),
    Case(group=1, dim=80, bits=4, window=4, splits=(1, 1)),
    Case(group=7, kv_heads=1, dim=96, window=16, value_group=32, splits=(3, 2)),
    Case(group=4, dim=128, window=8, splits=(1, 3), context=330),
    Case(group=8, kv_heads=1, dim=256, bits=4, window=32, context=900, splits=(2, 3)),
    Case(group=4, dim=80, rotary=32, scope="kv_head", bits=4, splits=(5, 4)),
    Case(group=2, dim=128, rotary=64, value_group=64, window=16, softcap=15.0),
    Case(group=3, pads=(0, 21), softcap=8.0, scope="kv_head", context=400, budget=0.12),
    Case(group=1, pads=(3, 0, 30), window=4, context=400, budget=0.12),
    Case(stored=torch.float16),
    Case(stored=torch.bfloat16, bits=4),
    Case(ranker="p_norm"),
    Case(ranker="key_norm"),
)


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_float32_query_agrees_with_the_twin(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (mine, theirs) in both(case, monkeypatch).items():
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5, msg=named(name))


# bfloat16 products are left to a device: the interpreter multiplies their bit patterns.
HALF = (
    Case(query=torch.float16, stored=torch.float16),
    Case(query=torch.float16, stored=torch.float32),
    Case(query=torch.float16, stored=torch.float16, bits=4, group=4, dim=128, context=330),
    Case(query=torch.float16, stored=torch.float16, window=16, value_group=16),
    Case(query=torch.float16, stored=torch.float16, rotary=32, softcap=20.0),
)


@pytest.mark.parametrize("case", HALF, ids=str)
def test_half_query_errs_as_half_does(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float32 arithmetic on the same stored numbers, in units of the type's own rounding."""
    unit = torch.finfo(case.query).eps
    found = both(case, monkeypatch)
    out, want = (x.float() for x in found["out"])
    assert float((out - want).norm() / want.norm()) < 2 * unit
    for name in ("arena", "ledger"):
        mine, theirs = found[name]
        torch.testing.assert_close(mine, theirs, atol=4 * unit * float(theirs.max()), rtol=8 * unit)


def test_any_number_of_splits_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(context=400)
    results = [both(replace(case, splits=splits), monkeypatch) for splits in ((1, 1), (4, 3), (9, 9))]
    for other in results[1:]:
        for name, (mine, _) in other.items():
            torch.testing.assert_close(mine, results[0][name][0], atol=1e-6, rtol=1e-5)


def driven(
    config: QEvictConfig,
    make: Callable[[Ranker], FusedCudaBackend] | None,
    steps: list[int],
    **shape: Any,
) -> Drive:
    drive = Drive(config, **shape)
    drive.cache.parts[0].backend = EagerBackend() if make is None else make(Ranker(config))
    return drive.run(steps)


def same_run(mine: Drive, theirs: Drive) -> None:
    """The same outputs, decisions, scores and places all the way."""
    for ours, wanted in zip(mine.outputs, theirs.outputs, strict=True):
        for a, b in zip(ours, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
    for found, expected in zip(mine.records, theirs.records, strict=True):
        assert torch.equal(found.after, expected.after)
        torch.testing.assert_close(found.scores, expected.scores, atol=2e-5, rtol=2e-5)
    pool, twin = mine.cache.state.pool, theirs.cache.state.pool
    assert torch.equal(pool.ledger_ids, twin.ledger_ids) and torch.equal(pool.arena_ids, twin.arena_ids)


@pytest.mark.parametrize("shape", ({}, {"pads": (0, 5), "softcap": 20.0}), ids=str)
def test_a_run_with_events_and_an_append(shape: dict[str, Any]) -> None:
    """Prompt, decode across events, a second prompt, decode: the same outputs, scores and places all the way."""
    config = QEvictConfig(kv_budget=0.5, planned_new_tokens=40, window_size=4, sink_tokens=3, local_tokens=8)
    steps = [50, 1, 1, 1, 1, 1, 6, 1, 1, 1]
    mine, theirs = (driven(config, make, steps, layers=1, **shape) for make in (FusedCudaBackend, None))
    same_run(mine, theirs)
    pool, twin = mine.cache.state.pool, theirs.cache.state.pool
    torch.testing.assert_close(pool.arena_scores, twin.arena_scores, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(pool.ledger_scores, twin.ledger_scores, atol=2e-5, rtol=2e-5)


def test_a_run_without_a_quant_tier() -> None:
    config = QEvictConfig(kv_budget=0.5, quant_share=0.0, planned_new_tokens=20, window_size=2, sink_tokens=3)
    mine, theirs = (driven(config, make, [40, 1, 1, 1], layers=1) for make in (FusedCudaBackend, None))
    for ours, wanted in zip(mine.outputs, theirs.outputs, strict=True):
        torch.testing.assert_close(ours[0], wanted[0], atol=2e-5, rtol=2e-5)
    pools = mine.cache.state.pool, theirs.cache.state.pool
    torch.testing.assert_close(pools[0].arena_scores, pools[1].arena_scores, atol=2e-5, rtol=2e-5)


# ---- flash2: a stand-in for the flash kernel, the real one for codes ---------------------------------------------


def package(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, cache_seqlens: torch.Tensor,
    cache_leftpad: torch.Tensor | None, softmax_scale: float, causal: bool, softcap: float, return_softmax_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What package flash-attn documents of this call: [B, T, H, d] in, lengths int32, no mask."""
    assert return_softmax_lse and not causal and cache_seqlens.dtype == torch.int32
    assert q.shape[1] == 1 and q.dtype == k_cache.dtype == v_cache.dtype and k_cache.stride(-1) == 1
    outs, lses = [], []
    for b in range(q.shape[0]):
        first = 0 if cache_leftpad is None else int(cache_leftpad[b])
        seen = slice(first, int(cache_seqlens[b]))
        query = q[b : b + 1].transpose(1, 2)
        key, value = (x[b : b + 1, seen].transpose(1, 2) for x in (k_cache, v_cache))
        out, lse = attend(query, key, value, scale=softmax_scale, softcap=softcap or None)
        outs.append(out.transpose(1, 2))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def by_package(ranker: Ranker) -> Flash2Backend:
    return Flash2Backend(ranker, PackageKernel())


def by_torch(ranker: Ranker) -> Flash2Backend:
    return Flash2Backend(ranker, torch_kernel)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_with_kvcache=package))


FLASH = (
    Case(),
    Case(group=1, dim=80, bits=4, window=4, splits=(1, 3)),
    Case(group=4, dim=128, softcap=15.0, context=330),
    Case(group=2, scope="kv_head", value_group=16),
    Case(ranker="p_norm"),
    Case(query=torch.float16, stored=torch.float16),
    Case(query=torch.float16, stored=torch.float16, group=7, kv_heads=1, window=16, bits=4),
)


@pytest.mark.parametrize("flash2", (by_package, by_torch))
@pytest.mark.parametrize("case", FLASH, ids=str)
def test_flash2_joins_a_flash_kernel_with_the_codes(case: Case, monkeypatch: pytest.MonkeyPatch, flash2: Any) -> None:
    """Output and log-sum-exp of the joint softmax; the twin scores nothing in its step, so its codes' masses differ."""
    found = both(case, monkeypatch, make=flash2)
    unit = torch.finfo(case.query).eps
    out, want = (x.float() for x in found["out"])
    assert float((out - want).norm() / want.norm()) < max(2 * unit, 5e-6)
    torch.testing.assert_close(*found["lse"], atol=max(4 * unit, 2e-5), rtol=2 * unit)
    assert torch.equal(*found["key"]) and torch.equal(*found["value"])
    assert not found["arena"][0].any(), "full-precision windows are scored at the event"
    assert bool(found["ledger"][0].any()) == (case.ranker == "cumulative")


PADDED = {"pads": (0, 5), "softcap": 20.0}


@pytest.mark.parametrize(
    ("flash2", "shape", "changes"),
    (
        (by_package, {}, {}),
        (by_torch, PADDED, {}),
        (by_torch, {}, {"ranker": "decayed", "decay_half_life": 7.0}),
        (by_package, PADDED, {"score_scope": "kv_head"}),
    ),
    ids=str,
)
def test_a_run_of_flash2_routes_as_the_reference_does(
    flash2: Any, shape: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Events, an append on top of pools, padding: decisions and scores are the reference's."""
    settings = {"kv_budget": 0.5, "planned_new_tokens": 40, "window_size": 4, "sink_tokens": 3, "local_tokens": 8}
    config = QEvictConfig(**{**settings, **changes})
    steps = [46, *[1] * 6, 6, 1, 1]
    mine, theirs = (driven(config, make, steps, layers=1, **shape) for make in (flash2, None))
    assert len(mine.records) >= 3 and mine.cache.state.live_used
    same_run(mine, theirs)
    assert mine.cache.workspace_bytes > 0 and mine.cache.backend_name == "flash2"


@pytest.mark.parametrize("past", (0, 30))
@pytest.mark.parametrize("changes", ({}, {"softcap": 5.0, "weighted": True}, {"power": 2.0, "pad": 7}), ids=str)
@pytest.mark.parametrize("dim", (64, 80))
def test_prompt_columns(past: int, changes: dict[str, Any], dim: int) -> None:
    torch.manual_seed(past + dim)
    heads, kv_heads, tokens = 6, 2, 70
    keys = past + tokens
    query, key = torch.randn(1, heads, tokens, dim), torch.randn(1, kv_heads, keys, dim)
    lse = torch.rand(1, heads, tokens) + 4
    pad, power, softcap = changes.get("pad", 0), changes.get("power", 1.0), changes.get("softcap")
    weights = torch.rand(tokens) if changes.get("weighted") else None
    wanted = prompt_column_masses(
        query,
        key,
        lse,
        scale=0.1,
        softcap=softcap,
        query_start=past,
        key_start=0,
        first_valid=pad,
        weights=weights,
        power=power,
    )
    blocks = -(-(keys + 3) // 8)
    padded = torch.nn.functional.pad(group_mean(wanted[None], 2), (3, blocks * 8 - keys - 3))
    found = triton_columns.column_masses(
        query[0],
        key[0],
        lse[0],
        scale=0.1,
        window_size=8,
        grid_offset=3,
        first_query_column=past,
        first_column=pad,
        groups=2,
        softcap=softcap or 0.0,
        weights=weights,
        power=power,
    )
    torch.testing.assert_close(found, padded.unflatten(1, (blocks, 8)).sum(-1), atol=1e-5, rtol=1e-5)
