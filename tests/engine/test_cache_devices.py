"""A model whose layers lie on several devices: the parts together do what one cache on one device does, bit for bit.

Where there is one device only, layers are split between parts on it, which is all that the cache sees of a device.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import engine.cache
from engine.adapter import cache_keyword
from engine.attention import unavailable
from engine.baselines.qevict import TieredCache
from engine.cache import QEvictCache
from engine.cache_part import DeviceGroup, device_groups, grouped
from engine.config import QEvictConfig
from engine.errors import CacheUseError, UnsupportedModelError
from engine.evaluation.live import HeadScores
from engine.generate import RunOptions, generate
from engine.prefix import PrefixStore, put, take
from engine.trace import (
    EndEvent,
    Keyframe,
    LateMetrics,
    RoutingEvent,
    ScoreEvent,
    StepEvent,
    Tier,
    TraceEvent,
)
from tests.engine.drive import BACKENDS, Drive
from tests.tiny import tiny_loaded, tiny_model

torch.set_num_threads(1)

LAYERS = 4
CPU = torch.device("cpu")
BASE: dict[str, Any] = {
    "window_size": 4,
    "sink_tokens": 5,
    "local_tokens": 8,
    "kv_budget": 0.35,
    "planned_new_tokens": 40,
}
TURNS = [61, *[1] * 10, 9, *[1] * 8, 2, 1]
Split = Callable[..., None]


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Split:
    """Makes caches built from now on put so many layers into each part; none = as the devices are."""

    def split_at(*counts: int) -> None:
        starts = [sum(counts[:place]) for place in range(len(counts))]

        def groups(model: PreTrainedModel, managed: list[int]) -> list[DeviceGroup]:
            assert sum(counts) == len(managed)
            return [DeviceGroup(CPU, start, count) for start, count in zip(starts, counts, strict=True)]

        monkeypatch.setattr(engine.cache, "device_groups", groups if counts else device_groups)

    return split_at


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def assert_same(whole: QEvictCache, parts: QEvictCache) -> None:
    """All that a caller may ask of two caches is equal, and so is every byte in their pools."""
    assert len(whole.parts) == 1 < len(parts.parts)
    assert same(whole.board, parts.board) and whole.aged_blocks == parts.aged_blocks
    assert whole.plan == parts.plan and whole.num_events == parts.num_events > 0
    assert np.array_equal(whole.occupied, parts.occupied) and whole.pool_shape == parts.pool_shape
    for name in ("pool_bytes", "lane_padding_bytes", "scoring_bytes", "prefill_peak_bytes", "batch", "backend_name"):
        assert getattr(whole, name) == getattr(parts, name), name
    assert whole.pool_bytes > 0
    stores = [state.pool for state in parts.states]
    for name, tensor in whole.state.pool.persistent_tensors().items():
        assert same(tensor, torch.cat([store.persistent_tensors()[name] for store in stores])), name
    assert [layer.get_seq_length() for layer in whole.layers] == [layer.get_seq_length() for layer in parts.layers]


def assert_same_records(whole: Drive, parts: Drive) -> None:
    assert len(whole.records) == len(parts.records) > 2
    for one, other in zip(whole.records, parts.records, strict=True):
        assert (one.event_id, one.columns) == (other.event_id, other.columns)
        assert same(one.before, other.before) and same(one.after, other.after) and same(one.scores, other.scores)
        assert other.seconds > 0
    assert parts.cache.route_seconds == pytest.approx(sum(record.seconds for record in parts.records))
    after = whole.records[-1].after
    assert bool((after == Tier.EVICTED).any()) and bool((after == Tier.QUANT).any())


def drive(config: QEvictConfig, pads: tuple[int, ...]) -> Drive:
    return Drive(config, layers=LAYERS, pads=pads, spread=1.5, seed=3)


def feed_alike(whole: Drive, parts: Drive, turns: list[int]) -> None:
    for tokens in turns:
        new = whole.draw(tokens)
        for one, other in zip(whole.feed(new), parts.feed(new), strict=True):
            assert same(one, other)
        parts.columns = whole.columns


SETTINGS: list[dict[str, Any]] = [
    {},
    {"score_scope": "kv_head"},
    {"prefill_queries": 6},
    {"ranker": "decayed", "decay_half_life": 20.0},
    {"ranker": "key_norm"},
    {"prefill_routing": "chunk"},
    {"kv_budget_bytes": 36_000},
]


@pytest.mark.parametrize("pads", [(0,), (0, 3)], ids=["one row", "padded rows"])
@pytest.mark.parametrize("changes", SETTINGS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_do_what_one_cache_does(
    split: Split, backend: str, changes: dict[str, Any], pads: tuple[int, ...]
) -> None:
    config = QEvictConfig(**{**BASE, **changes}, backend=backend)
    whole = drive(config, pads)
    split(2, 2)
    parts = drive(config, pads)
    feed_alike(whole, parts, TURNS)
    assert_same(whole.cache, parts.cache)
    assert_same_records(whole, parts)


@pytest.mark.parametrize("counts", [(1, 3), (3, 1), (1, 1, 1, 1)], ids=str)
def test_any_split_will_do(split: Split, counts: tuple[int, ...]) -> None:
    config = QEvictConfig(**BASE)
    whole = drive(config, (0,))
    split(*counts)
    parts = drive(config, (0,))
    feed_alike(whole, parts, TURNS)
    assert [part.count for part in parts.cache.parts] == list(counts)
    assert_same(whole.cache, parts.cache)
    assert_same_records(whole, parts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("moment", ["staged", "between events", "after an event"])
def test_rows_are_chosen_in_every_part(split: Split, backend: str, moment: str) -> None:
    config = QEvictConfig(**BASE, backend=backend)
    turns = {"staged": [61], "between events": [61, *[1] * 6], "after an event": [61, *[1] * 11]}[moment]
    whole = drive(config, (0, 3))
    split(1, 3)
    parts = drive(config, (0, 3))
    feed_alike(whole, parts, turns)
    for fed in (whole, parts):
        for layer in fed.cache.layers:
            layer.reorder_cache(torch.tensor([1, 0, 1]))
        fed.pads = [3, 0, 3]
    whole.draws = [np.random.default_rng(seed) for seed in (7, 8, 9)]
    feed_alike(whole, parts, [*[1] * 9, 7, *[1] * 5])
    assert_same(whole.cache, parts.cache)
    assert parts.cache.batch == 3
    assert all(state.pads == [3, 0, 3] for state in parts.cache.states)


def test_a_reset_forgets_every_part(split: Split) -> None:
    split(2, 2)
    config = QEvictConfig(**BASE)
    used, fresh = drive(config, (0,)), drive(config, (0,))
    used.run(TURNS)
    used.cache.reset()
    assert all(part.held is None for part in used.cache.parts)
    assert used.cache.pool_bytes == used.cache.scoring_bytes == used.cache.batch == used.cache.num_events == 0
    used.columns, used.draws = 0, [np.random.default_rng(3000)]
    feed_alike(fresh, used, TURNS)
    assert same(fresh.cache.board, used.cache.board)


def test_an_unfinished_forward_is_noticed_in_any_part(split: Split) -> None:
    split(2, 2)
    fed = drive(QEvictConfig(**BASE), (0,)).run([61, 1])
    new = fed.draw(1)
    layer = fed.cache.layers[0]
    q, k, v = new[0]
    call: dict[str, Any] = {"scale": 0.25, "softcap": None, "position_ids": None}
    layer.attend(torch.nn.Identity(), q, *layer.update(k, v)[:1], v, None, **call)
    with pytest.raises(CacheUseError, match="did not finish"):
        layer.attend(torch.nn.Identity(), q, *layer.update(k, v)[:1], v, None, **call)


def test_one_state_where_there_is_one_and_a_list_where_there_are_more(split: Split) -> None:
    config = QEvictConfig(**BASE)
    whole = drive(config, (0,))
    with pytest.raises(CacheUseError, match="the cache is empty"):
        _ = whole.cache.states
    whole.run([40, 1])
    assert whole.cache.states == [whole.cache.state] and whole.cache.lead is whole.cache.state
    split(2, 2)
    parts = drive(config, (0,)).run([40, 1])
    with pytest.raises(CacheUseError, match="lies on 2 devices: ask for `states`"):
        _ = parts.cache.state
    assert [state.shape.num_layers for state in parts.cache.states] == [2, 2]
    assert parts.cache.lead is parts.cache.states[0]


def test_staged_keys_are_asked_for_by_managed_layer(split: Split) -> None:
    split(1, 3)
    fed = drive(QEvictConfig(**BASE), (0,)).run([40])
    for layer, (_, key, value) in enumerate(fed.seen[0]):
        staged_key, staged_value = fed.cache.staged(layer)
        assert same(staged_key, key) and same(staged_value, value)
    fed.step(1)
    with pytest.raises(CacheUseError, match="no prompt is staged"):
        fed.cache.staged(3)


# ---- with a model ------------------------------------------------------------------------------------


CONFIG = QEvictConfig(kv_budget=0.4, window_size=8)
DOCUMENT = " ".join(f"word{number % 17} is number {number}" for number in range(40))


def run(store: PrefixStore | None, prompt: str, reference: bool) -> list[TraceEvent]:
    loaded = tiny_loaded(num_layers=LAYERS)
    options = RunOptions(max_new_tokens=30, reference=reference, ignore_eos=True, keyframe_every=2)
    document = "" if store is None else DOCUMENT
    text = f"{DOCUMENT}\n{prompt}" if store is None else prompt
    return list(generate(loaded, text, CONFIG, options, document=document, prefixes=store))


def seen(event: TraceEvent) -> object:
    """What two equal runs have in common: everything but times and the kernel's own workspace."""
    if isinstance(event, StepEvent):
        return event.ids
    if isinstance(event, RoutingEvent):
        moved = event.promotions, event.demotions, event.evictions, event.aged
        return event.event_id, event.seq_len, event.migrations.tobytes(), event.memory, moved
    if isinstance(event, Keyframe):
        return event.event_id, event.tiers.tobytes(), event.memory
    if isinstance(event, ScoreEvent):
        return event.event_id, event.row, event.top, event.levels.tobytes()
    if isinstance(event, LateMetrics):
        return event
    if isinstance(event, EndEvent):
        kept = {key: value for key, value in event.summary["kv"].items() if key != "kernel_bytes"}
        return event.summary["text"], event.summary["backend"], kept, event.summary["metrics"], event.summary["routing"]
    return type(event)


def test_a_run_with_its_reference_is_the_same_event_by_event(split: Split) -> None:
    whole = run(None, "What is word3?", True)
    split(2, 2)
    parts = run(None, "What is word3?", True)
    assert [seen(event) for event in whole] == [seen(event) for event in parts]
    assert sum(isinstance(event, RoutingEvent) for event in parts) > 2
    assert sum(isinstance(event, LateMetrics) for event in parts) > 2


def test_a_kept_document_is_put_back_into_every_part(split: Split) -> None:
    stores = PrefixStore(), PrefixStore()
    whole = [run(stores[0], prompt, False) for prompt in ("Who is word5?", "What is word3?")]
    split(1, 3)
    parts = [run(stores[1], prompt, False) for prompt in ("Who is word5?", "What is word3?")]
    for one, other in zip(whole, parts, strict=True):
        assert [seen(event) for event in one] == [seen(event) for event in other]
    assert stores[0].hits == stores[1].hits == 1 and stores[0].nbytes == stores[1].nbytes > 0


def test_a_snapshot_is_put_back_only_where_its_layers_lay(split: Split) -> None:
    split(2, 2)
    first, fits = drive(QEvictConfig(**BASE), (0,)), drive(QEvictConfig(**BASE), (0,))
    split(1, 3)
    other = drive(QEvictConfig(**BASE), (0,))
    first.run([61])
    first.cache.settle()
    snapshot = take(first.cache, first.records, torch.zeros(1))
    with pytest.raises(CacheUseError, match="only where every layer lies"):
        put(other.cache, snapshot)
    put(fits.cache, snapshot)
    fits.columns = first.columns
    feed_alike(first, fits, [1] * 10)
    assert same(first.cache.board, fits.cache.board)


@pytest.mark.parametrize("running", [False, True])
def test_a_comparison_asks_all_parts(split: Split, monkeypatch: pytest.MonkeyPatch, running: bool) -> None:
    monkeypatch.setattr("tests.engine.drive.QEvictCache", TieredCache)
    config = QEvictConfig(**BASE)
    whole = drive(config, (0,))
    split(2, 2)
    parts = drive(config, (0,))
    caches = [fed.cache for fed in (whole, parts) if isinstance(fed.cache, TieredCache)]
    for cache in caches:
        cache.running = running
        cache.late_budget = lambda shape, columns: config.replace(kv_budget=0.45)
        assert cache.persistent_tensors() == {} and cache.persistent_bytes == 0
    feed_alike(whole, parts, [61, *[1] * 30])
    assert len(caches) == 2 and same(caches[0].residency(), caches[1].residency())
    assert caches[0].persistent_bytes == caches[1].persistent_bytes > 0
    for cache in caches:
        held = sum(tensor.nbytes for tensor in cache.persistent_tensors().values())
        assert held == cache.allocated_bytes == caches[0].allocated_bytes
    assert_same(*caches)


def test_scores_by_head_come_from_all_parts(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.drive.QEvictCache", HeadScores)
    config = QEvictConfig(**BASE, backend="sdpa")
    whole = drive(config, (0,))
    split(2, 2)
    parts = drive(config, (0,))
    feed_alike(whole, parts, [61, *[1] * 20])
    heads = [fed.cache.heads for fed in (whole, parts) if isinstance(fed.cache, HeadScores)]
    one, other = heads
    assert one is not None and other is not None and same(one, other) and one.shape[0] == LAYERS


# ---- devices -----------------------------------------------------------------------------------------


def test_layers_are_grouped_by_device_in_order() -> None:
    one, two = torch.device("cuda", 0), torch.device("cuda", 1)
    assert grouped([one, one, two], [0, 1, 2]) == [DeviceGroup(one, 0, 2), DeviceGroup(two, 2, 1)]
    assert grouped([one, two, one], [1, 3, 5]) == [
        DeviceGroup(one, 0, 1),
        DeviceGroup(two, 1, 1),
        DeviceGroup(one, 2, 1),
    ]
    assert device_groups(tiny_model(num_layers=3), [0, 1, 2]) == [DeviceGroup(CPU, 0, 3)]


def test_offloaded_layers_are_refused_by_name() -> None:
    devices = [torch.device("cuda", 0), torch.device("meta"), torch.device("meta")]
    with pytest.raises(UnsupportedModelError, match=r"offloaded .*: 3, 5\."):
        grouped(devices, [1, 3, 5])


def moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return tuple(moved(part, device) for part in value) if isinstance(value, tuple) else value


def spread_over(model: PreTrainedModel, devices: list[torch.device]) -> PreTrainedModel:
    """Lays the layers on devices in turn, as a device_map does: every module fetches what it is given."""

    def lay(module: torch.nn.Module, device: torch.device) -> None:
        def fetch(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return moved(args, device), {name: moved(value, device) for name, value in kwargs.items()}

        module.to(device)
        module.register_forward_pre_hook(fetch, with_kwargs=True)

    inner = model.model
    count = len(inner.layers)
    for index, layer in enumerate(inner.layers):
        lay(layer, devices[index * len(devices) // count])
    for module in (inner.embed_tokens, inner.rotary_emb):
        lay(module, devices[0])
    for module in (inner.norm, model.lm_head):
        lay(module, devices[-1])
    return model


def pairs() -> list[list[torch.device]]:
    """Two parts on the CPU, and every kind of pair that this machine has."""
    found = [[CPU, CPU]]
    if torch.cuda.is_available():
        found += [[torch.device("cuda", 0), CPU], [CPU, torch.device("cuda", 0)]]
        if torch.cuda.device_count() > 1:
            found.append([torch.device("cuda", 0), torch.device("cuda", 1)])
    return found


def continued(model: PreTrainedModel, cache: QEvictCache, ids: Tensor, mask: Tensor | None) -> Tensor:
    """Logits [B, steps, vocabulary] of a prompt in two chunks and 40 tokens after it, on the host."""
    out = []
    for begin, end in ((0, 70), (70, 100), *((at, at + 1) for at in range(100, ids.shape[1]))):
        seen_mask = None if mask is None else mask[:, :end]
        with torch.no_grad():
            result = model(
                input_ids=ids[:, begin:end],
                attention_mask=seen_mask,
                position_ids=None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)[:, begin:end],
                use_cache=True,
                **{cache_keyword(model): cache},
            )
        out.append(result.logits[:, -1].float().cpu())
    return torch.stack(out, 1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "eager"])
@pytest.mark.parametrize("devices", pairs(), ids=str)
def test_a_spread_model_says_what_the_same_model_says_on_one_device(
    split: Split, devices: list[torch.device], backend: str, padded: bool
) -> None:
    for device in devices:
        reason = unavailable(backend, str(device), 16)
        if reason is not None:
            pytest.skip(reason)
    # Nothing competes here, so that last bits of another device's arithmetic cannot turn a decision.
    config = QEvictConfig(kv_budget=1.0, quant_share=0.0, planned_new_tokens=60, backend=backend)
    if devices[0] == devices[1]:
        config = QEvictConfig(kv_budget=0.3, window_size=4, local_tokens=8, planned_new_tokens=60, backend=backend)
    ids = torch.randint(3, 250, (2 if padded else 1, 140), generator=torch.Generator().manual_seed(1))
    mask = None
    if padded:
        mask = torch.ones_like(ids)
        mask[1, :7] = 0
    plain = tiny_model(num_layers=LAYERS)
    wanted = continued(plain, QEvictCache(plain, config), ids, mask)
    model = spread_over(tiny_model(num_layers=LAYERS), devices)
    if devices[0] == devices[1]:
        split(2, 2)
    cache = QEvictCache(model, config)
    got = continued(model, cache, ids.to(devices[0]), None if mask is None else mask.to(devices[0]))
    assert [part.device for part in cache.parts] == devices and cache.board.shape[0] == LAYERS * ids.shape[0]
    for part in cache.parts:
        assert part.state.pool.arena_key.device == part.device
    if devices[0] == devices[1]:
        assert same(got, wanted)
    else:
        torch.testing.assert_close(got, wanted, atol=3e-3, rtol=1e-2)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize("devices", pairs(), ids=str)
def test_accelerate_dispatches_a_model(split: Split, devices: list[torch.device]) -> None:
    dispatch: Any = importlib.import_module("accelerate").dispatch_model
    if devices[0] != devices[1] and CPU in devices:
        pytest.skip("accelerate keeps CPU layers beside a GPU as offloaded ones, which are refused")
    model = tiny_model(num_layers=LAYERS)
    ids = torch.randint(3, 250, (1, 140), generator=torch.Generator().manual_seed(1))
    wanted = continued(model, QEvictCache(model, CONFIG), ids, None)
    places = {f"model.layers.{index}": devices[index * 2 // LAYERS] for index in range(LAYERS)}
    places |= {"model.embed_tokens": devices[0], "model.rotary_emb": devices[0]}
    places |= {"model.norm": devices[1], "lm_head": devices[1]}
    model = dispatch(model, device_map=places, skip_keys="past_key_values", force_hooks=True)
    if devices[0] == devices[1]:
        split(2, 2)
    cache = QEvictCache(model, CONFIG)
    got = continued(model, cache, ids.to(devices[0]), None)
    assert len(cache.parts) == 2
    torch.testing.assert_close(got, wanted, atol=3e-3, rtol=1e-2)
