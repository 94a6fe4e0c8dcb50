"""The pools: what lies where, the write-once ledger, bytes, growth."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.budget import KVShape, larger_plan, make_plan
from engine.config import QEvictConfig
from engine.errors import CacheUseError
from engine.quant import LANES, dequantize
from engine.trace import Tier
from tests.engine.drive import Drive, RowView, check_bytes, check_prefixes
from tests.engine.oracle import turn

BASE: dict[str, Any] = {
    "window_size": 4,
    "sink_tokens": 5,
    "local_tokens": 8,
    "kv_budget": 0.5,
    "planned_new_tokens": 40,
    "backend": "sdpa",
}


def settled(**changes: Any) -> Drive:
    """A cache right after an event that fell on the grid, with windows in all tiers."""
    drive = Drive(QEvictConfig(**{**BASE, **changes}), seed=2, spread=1.5).run([61, 1, 1, 1, 1])
    assert len(drive.records) == 2
    return drive


def set_scores(view: RowView, wanted: dict[int, float]) -> None:
    for block, slot in view.arena.items():
        view.store.arena_scores[view.n, slot] = wanted.get(block, 0.0)
    for block, slot in view.live.items():
        view.store.ledger_scores[view.n, slot] = wanted.get(block, 0.0)


@pytest.mark.parametrize("changes", [{}, {"bits": 4}, {"kv_dtype": "float16"}, {"value_group_size": 8},
                                     {"score_scope": "kv_head"}])  # fmt: skip
def test_a_hundred_round_trips_leave_codes_as_they_are(changes: dict[str, Any]) -> None:
    """Windows are sent up and down at random; every ledger entry keeps its bytes for ever, no evicted id returns."""
    drive = settled(**changes)
    chance = np.random.default_rng(0)
    written: dict[tuple[int, int], tuple[bytes, ...]] = {}
    trips: dict[tuple[int, int], int] = {}
    gone: dict[int, set[int]] = {}
    for _ in range(140):
        for view in drive.rows():
            for block, slot in {**view.live, **view.shadows}.items():
                raw = view.raw_entry(slot)
                assert written.setdefault((view.n, block), raw) == raw, "an entry was written again"
            held = set(view.arena) | set(view.live)
            lost = {b for b, tier in enumerate(view.board) if tier == Tier.EVICTED}
            assert not lost & held
            assert gone.get(view.n, set()) <= lost
            gone[view.n] = lost
            set_scores(view, {b: float(chance.random()) for b in held})
        before = [view.board for view in drive.rows()]
        drive.cache._route()
        check_prefixes(drive.cache)
        check_bytes(drive.cache)
        for view, old in zip(drive.rows(), before, strict=True):
            for block, (was, now) in enumerate(zip(old, view.board, strict=True)):
                if (was, now) == (Tier.QUANT, Tier.FULL):
                    trips[view.n, block] = trips.get((view.n, block), 0) + 1
                    check_promoted(drive, view, block)
    # Once the surplus is evicted the survivors go on commuting.
    assert max(trips.values()) >= 25 and sum(trips.values()) >= 100 * len(before)


def test_one_window_goes_up_and_down_a_hundred_times() -> None:
    drive = settled()
    view = drive.rows()[0]
    favourite = min(view.live)
    raw = view.raw_entry(view.live[favourite])
    for trip in range(200):
        for other in drive.rows():
            set_scores(other, {b: 1.0 for b in set(other.arena) | set(other.live)})
        held = set(view.arena) | set(view.live)
        set_scores(view, {b: 1.0 for b in held} | {favourite: 2.0 if trip % 2 == 0 else 0.5})
        drive.cache._route()
        where = view.shadows if trip % 2 == 0 else view.live
        assert favourite in where, (trip, view.board)
        assert view.raw_entry(where[favourite]) == raw
    assert drive.cache.num_events == 202


def check_promoted(drive: Drive, view: RowView, block: int) -> None:
    """A promoted window equals its dequantized self: residency comes back, precision does not."""
    store, state = view.store, drive.cache.state
    slot, entry = view.arena[block], view.shadows[block]
    positions = store.columns(torch.tensor([block]))
    key, value = store.dequantized(torch.tensor([view.n]), torch.tensor([entry]), positions, state.rope)
    torch.testing.assert_close(store.arena_key[view.n, :, slot], key[0].to(store.dtype))
    torch.testing.assert_close(store.arena_value[view.n, :, slot], value[0].to(store.dtype))


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("changes", [{}, {"quant_share": 1.0}, {"value_group_size": 4},
                                     {"kv_dtype": "bfloat16", "kv_budget": 0.8}])  # fmt: skip
def test_every_quant_window_is_within_half_a_step_of_its_tokens(bits: int, changes: dict[str, Any]) -> None:
    """Also those that went from local straight to Quant, and from the staged prompt straight to Quant."""
    drive = Drive(QEvictConfig(**{**BASE, "bits": bits, **changes}), seed=4)
    checked: set[tuple[int, int]] = set()
    origins = set()
    for tokens in [61, *[1] * 24]:
        drive.step(tokens)
        for view in drive.rows() if drive.records else []:
            for block, slot in view.live.items():
                if (view.n, block) not in checked:
                    checked.add((view.n, block))
                    record = drive.records[-1]
                    origins.add((record.event_id > 0, int(record.before[view.n, block])))
                    check_entry(drive, view, block, slot)
    assert (False, int(Tier.LOCAL)) in origins, "the staged prompt gave none"
    assert (True, int(Tier.LOCAL)) in origins, "decoding gave none"


def check_entry(drive: Drive, view: RowView, block: int, slot: int) -> None:
    store = view.store
    grain = {torch.float32: 1e-5, torch.bfloat16: 2**-8 * 6}[store.dtype]
    packed = store.read_entries(torch.tensor([view.n]), torch.tensor([slot]))
    back_key, back_value = dequantize(packed, drive.config.bits)
    keys = torch.cat([step[view.n][1] for step in drive.seen], 2)[0]
    values = torch.cat([step[view.n][2] for step in drive.seen], 2)[0]
    for head in range(2):
        for place, column in enumerate(store.columns(torch.tensor(block)).tolist()):
            plain = turn(keys[head, column].double().numpy(), column, drive.inv_freq, back=True)
            step = packed.key_scale[0, head].double().numpy()
            assert (abs(plain - back_key[0, head, place].double().numpy()) <= 0.501 * step + grain).all()
            groups = packed.value_scale.shape[2]
            step = packed.value_scale[0, head, :, place].float().repeat_interleave(16 // groups)
            assert bool(((values[head, column] - back_value[0, head, place]).abs() <= 0.501 * step + grain).all())


def test_a_live_entry_is_in_front_and_a_shadow_is_charged() -> None:
    drive = settled(quant_share=0.4)
    for step in range(40):
        drive.step(1)
        check_prefixes(drive.cache)
        for view in drive.rows():
            full = [b for b, tier in enumerate(view.board) if tier == Tier.FULL]
            quant = [b for b, tier in enumerate(view.board) if tier == Tier.QUANT]
            capacity = int(view.store.quant_capacity[view.n])
            assert set(view.shadows) <= set(full)
            assert len(view.live) + len(view.shadows) <= capacity
            assert set(quant) == set(view.live)
            # Nothing that could be kept was thrown away.
            if Tier.EVICTED in view.board:
                assert len(full) == int(view.store.full_capacity[view.n])
                assert len(quant) + len(view.shadows) == capacity, step


@pytest.mark.parametrize("pads", [(0,), (0, 0, 0), (7, 0)])
@pytest.mark.parametrize("changes", [{}, {"quant_share": 0.0}, {"kv_dtype": "float16"}, {"score_scope": "kv_head"},
                                     {"value_group_size": 4}, {"bits": 4}, {"kv_budget": 1.0}])  # fmt: skip
def test_bytes_of_real_tensors_fit_the_budget(pads: tuple[int, ...], changes: dict[str, Any]) -> None:
    drive = Drive(QEvictConfig(**{**BASE, **changes}), seed=4, pads=pads)
    for tokens in [61, *[1] * 30]:
        drive.step(tokens)
        if drive.cache.state.store is None:
            continue
        store = drive.cache.state.pool
        check_bytes(drive.cache)
        occupied = 0
        for view in drive.rows():
            occupied += len(view.arena) * store.plans[0].costs.full
            occupied += (len(view.live) + len(view.shadows)) * store.plans[0].costs.quant
        allowed = sum(plan.total_bytes for plan in store.plans) * drive.layers * drive.cache.state.shape.groups
        assert occupied <= allowed
    spare = store.lane_blocks * LANES - store.quant_slots
    assert 0 <= spare < LANES or not store.lane_blocks
    per_slot = store.plans[0].costs.quant
    assert store.lane_padding_bytes == spare * per_slot * drive.layers * drive.batch


def test_growing_keeps_everything() -> None:
    """A long append re-plans; every window that was there, and every code, is there still."""
    drive = settled(planned_new_tokens=8)
    old = drive.cache.plan
    before = [({b: v.raw_entry(s) for b, s in {**v.live, **v.shadows}.items()}, set(v.arena)) for v in drive.rows()]
    content = [
        {b: (v.store.arena_key[v.n, :, s].clone(), v.store.arena_value[v.n, :, s].clone()) for b, s in v.arena.items()}
        for v in drive.rows()
    ]
    drive.step(80)
    drive.step(1)
    new = drive.cache.plan
    assert new.total_bytes > old.total_bytes and new.planned_tokens == 61 + 4 + 80 + 8
    assert new.full_capacity >= old.full_capacity and new.quant_capacity > old.quant_capacity
    assert new.local_tokens == old.local_tokens
    check_bytes(drive.cache)
    check_prefixes(drive.cache)
    kept = 0
    for view, (codes, _), blocks in zip(drive.rows(), before, content, strict=True):
        for block, slot in {**view.live, **view.shadows}.items():
            if block in codes:
                kept += 1
                assert view.raw_entry(slot) == codes[block]
        for block, slot in view.arena.items():
            if block in blocks:
                kept += 1
                assert torch.equal(view.store.arena_key[view.n, :, slot], blocks[block][0])
                assert torch.equal(view.store.arena_value[view.n, :, slot], blocks[block][1])
    assert kept > 10


@pytest.mark.parametrize("budget", [0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.9])
def test_a_grown_plan_fits_its_budget(budget: float, share: float) -> None:
    """At large budgets bytes move from Quant to Full; when the length grows they must not be spent twice."""
    drive = settled(kv_budget=budget, quant_share=share, planned_new_tokens=8)
    for tokens in (30, 1, 60, 1):
        old = drive.cache.plan
        drive.step(tokens)
        new = drive.cache.plan
        assert new.full_capacity >= old.full_capacity and new.quant_capacity >= old.quant_capacity
        assert new.persistent_bytes <= new.total_bytes
        check_bytes(drive.cache)


def test_capacities_that_grow_fit_the_larger_budget() -> None:
    """Between two lengths the split shifts: the larger K_f and the larger K_q would not fit together."""
    chance = np.random.default_rng(0)
    crossed = 0
    for _ in range(4000):
        window = int(chance.choice([4, 8, 16]))
        config = QEvictConfig(
            window_size=window,
            kv_budget=float(chance.uniform(0.6, 0.95)),
            quant_share=float(chance.choice([0.3, 0.5, 0.7, 0.9])),
            local_tokens=window * int(chance.integers(1, 4)),
            planned_new_tokens=int(chance.integers(0, 60)),
        )
        shape = KVShape(1, 2, int(chance.choice([16, 64])), int(chance.choice([2, 4])))
        length = int(chance.integers(200, 300))
        old, new = (make_plan(config, shape, n) for n in (length, length + int(chance.integers(1, 80))))
        grown = larger_plan(old, new)
        assert grown.full_capacity >= old.full_capacity and grown.quant_capacity >= old.quant_capacity
        assert grown.persistent_bytes <= grown.total_bytes == new.total_bytes
        both = max(old.full_capacity, new.full_capacity), max(old.quant_capacity, new.quant_capacity)
        naive = replace(new, full_capacity=both[0], quant_capacity=both[1])
        crossed += naive.persistent_bytes > new.total_bytes
    assert crossed > 20, "the case that this test is about does not occur"


def test_an_evicted_id_that_comes_back_is_an_error() -> None:
    drive = settled().run([1] * 60)
    view = drive.rows()[0]
    gone = view.board.index(Tier.EVICTED)
    view.store.ledger_ids[view.n, 0] = gone
    with pytest.raises(CacheUseError, match="came back"):
        drive.run([1] * 4)


def test_the_ledger_holds_no_zeros() -> None:
    """A known prototype stored zeros for windows that went from local straight to Quant."""
    drive = Drive(QEvictConfig(**{**BASE, "quant_share": 1.0}), seed=4).run([61, *[1] * 24])
    for view in drive.rows():
        assert view.live
        for slot in view.live.values():
            keys, values = view.codes(slot)
            assert bool(keys.any()) and bool(values.any())
            assert keys.unique().numel() == values.unique().numel() == 4


def test_a_planned_block_count_is_what_the_length_needs() -> None:
    drive = Drive(QEvictConfig(**{**BASE, "kv_budget": 1.0}), seed=4).run([61, *[1] * 40])
    store = drive.cache.state.pool
    assert store.slots == math.ceil(5 / 4) + store.plans[0].full_capacity + store.plans[0].local_blocks
    assert all(Tier.EVICTED not in view.board and Tier.QUANT not in view.board for view in drive.rows())
