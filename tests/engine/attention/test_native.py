"""The compiled CPU kernels against a plain float64 twin that dequantizes, rotates, concatenates and takes a softmax."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from engine.attention import native, native_library
from engine.attention.native import LANES, DecodePlan, LedgerTensors, Shape
from engine.errors import BackendError

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.reason()))


@pytest.fixture(params=native.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.isa()
    native.use_isa(request.param)
    yield request.param
    native.use_isa(before)


def rope_tables(positions: int, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequency = 10_000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / max(rotary_dim, 1))
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(keys: torch.Tensor, positions: torch.Tensor, rotary_dim: int, scale: float) -> torch.Tensor:
    """keys [..., d] at integer positions [...], float64, half-split RoPE."""
    half = rotary_dim // 2
    frequency = 10_000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / max(rotary_dim, 1))
    angle = positions.double()[..., None] * frequency
    cosine, sine = angle.cos() * scale, angle.sin() * scale
    a, b = keys[..., :half], keys[..., half:rotary_dim]
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine, keys[..., rotary_dim:]], -1)


@dataclass
class Pools:
    """Random pools of one layer: a sink block, history, an open last block, and a ledger with shadows and rubbish."""

    shape: Shape
    seq_len: int
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor
    count: torch.Tensor
    pad: torch.Tensor
    ledger: LedgerTensors | None
    plan: DecodePlan

    def masses(self) -> tuple[torch.Tensor, torch.Tensor]:
        lanes = 0 if self.ledger is None else self.ledger.ids.shape[1]
        return torch.zeros(self.ids.shape), torch.zeros(self.ids.shape[0], lanes)


def make(
    shape: Shape, *, blocks: int, live: int, slots: int, lanes: int, dtype: torch.dtype = torch.float32,
    pads: tuple[int, ...] = (), open_tokens: int = 3, seed: int = 0, rubbish: bool = True,
) -> Pools:  # fmt: skip
    """`blocks` arena blocks (block 0 and the open last one among them) of `slots`, `live` windows of `lanes`."""
    draw = torch.Generator().manual_seed(seed)
    rows, heads = shape.batch * shape.rows_per_batch, shape.num_kv_heads // shape.rows_per_batch
    omega, d = shape.window_size, shape.head_dim
    total = 2 * (blocks + live) + 4
    last = total - 1
    seq_len = last * omega - shape.grid_offset + min(open_tokens, omega)
    pad = torch.zeros(rows, dtype=torch.int32)
    for b, columns in enumerate(pads):
        pad[b * shape.rows_per_batch : (b + 1) * shape.rows_per_batch] = columns
    first_whole = (int(pad.max()) + shape.grid_offset + omega - 1) // omega
    ids = torch.full((rows, slots), -1, dtype=torch.int32)
    count = torch.zeros(rows, dtype=torch.int32)
    ledger_ids = torch.full((rows, max(lanes, LANES)), -1, dtype=torch.int32)
    live_count = torch.zeros(rows, dtype=torch.int32)
    for row in range(rows):
        low = max(1, first_whole)
        chosen = torch.randperm(last - low, generator=draw)[: blocks + live] + low
        mine, n = chosen[: max(blocks - 2, 0)].tolist(), live if row == 0 else max(live - row * 3, 0)
        arena = ([int(pad[row] + shape.grid_offset) // omega] if blocks > 1 else []) + mine + ([last] if blocks else [])
        count[row] = len(arena)
        ids[row, : len(arena)] = torch.tensor(arena, dtype=torch.int32)
        codes = chosen[len(mine) : len(mine) + n]
        live_count[row] = len(codes)
        ledger_ids[row, : len(codes)] = codes.int()
        ledger_ids[row, len(codes) :] = -2 - torch.arange(ledger_ids.shape[1] - len(codes), dtype=torch.int32)
    keys = torch.randn(rows, heads, slots, omega, d, generator=draw).to(dtype)
    values = torch.randn(rows, heads, slots, omega, d, generator=draw).to(dtype)
    ledger = None
    if lanes:
        nb, size, groups = lanes // LANES, omega * shape.bits // 8, shape.value_groups

        def half(*dims: int, scale: float) -> torch.Tensor:
            return (torch.rand(*dims, generator=draw) * scale).half()

        levels = 2**shape.bits - 1
        ledger = LedgerTensors(
            torch.randint(0, 256, (rows, heads, nb, d, size, LANES), generator=draw, dtype=torch.uint8),
            half(rows, heads, nb, d, LANES, scale=3 / levels),
            (torch.randn(rows, heads, nb, d, LANES, generator=draw)).half(),
            torch.randint(0, 256, (rows, heads, lanes, size, d), generator=draw, dtype=torch.uint8),
            half(rows, heads, nb, groups, omega, LANES, scale=3 / levels),
            (torch.randn(rows, heads, nb, groups, omega, LANES, generator=draw)).half(),
            ledger_ids[:, :lanes].contiguous(),
            live_count,
        )
    if rubbish:  # what lies in unused places must never reach the result
        for row in range(rows):
            keys[row, :, int(count[row]) :] = float("nan")
            values[row, :, int(count[row]) :] = float("nan")
            values[row, :, max(int(count[row]) - 1, 0), min(open_tokens, omega) :] = float("nan")
            if ledger is not None:
                for lane in range(int(live_count[row]), lanes):
                    for tensor in (ledger.key_scale, ledger.key_zero):
                        tensor[row, :, lane // LANES, :, lane % LANES] = float("nan")
                    for tensor in (ledger.value_scale, ledger.value_zero):
                        tensor[row, :, lane // LANES, :, :, lane % LANES] = float("nan")
    cos, sin = rope_tables(total * omega + omega, shape.rotary_dim)
    plan = DecodePlan(shape, cos, sin)
    plan.bind(keys, values, ids, count, pad, ledger)
    query = torch.randn(shape.batch, shape.num_heads, d, generator=draw)
    return Pools(shape, seq_len, query, keys, values, ids, count, pad, ledger, plan)


def unpack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., KB] bytes to [..., KB * 8 / bits] codes."""
    per_byte = 8 // bits
    shifts = torch.arange(per_byte) * bits
    return ((codes.long()[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def twin(pools: Pools) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse, arena masses, ledger masses in float64, the long way."""
    shape, ledger = pools.shape, pools.ledger
    omega, d, o = shape.window_size, shape.head_dim, shape.grid_offset
    rows, heads = shape.batch * shape.rows_per_batch, shape.num_kv_heads // shape.rows_per_batch
    group = shape.num_heads // shape.num_kv_heads
    query = pools.query.double().reshape(rows, heads, group, d)
    out = torch.zeros(rows, heads, group, d, dtype=torch.float64)
    lse = torch.full((rows, heads, group), float("-inf"), dtype=torch.float64)
    masses = [x.double() for x in pools.masses()]
    offsets = torch.arange(omega)
    for row in range(rows):
        keys, values, owners = [], [], []
        for slot in range(int(pools.count[row])):
            columns = int(pools.ids[row, slot]) * omega + offsets - o
            seen = (columns >= pools.pad[row]) & (columns < pools.seq_len) & (columns >= 0)
            keys.append(pools.keys[row, :, slot, seen].double())
            values.append(pools.values[row, :, slot, seen].double())
            owners += [(0, slot)] * int(seen.sum())
        for lane in range(int(ledger.live_count[row]) if ledger is not None else 0):
            block, i = divmod(lane, LANES)
            positions = int(ledger.ids[row, lane]) * omega + offsets - o - pools.pad[row]
            codes = unpack(ledger.key_codes[row, :, block, :, :, i], shape.bits).double()
            scale, zero = ledger.key_scale[row, :, block, :, i, None], ledger.key_zero[row, :, block, :, i, None]
            k = zero + scale.double() * codes
            keys.append(rotate(k.transpose(1, 2), positions.expand(heads, omega), shape.rotary_dim, shape.rope_scale))
            codes = unpack(ledger.value_codes[row, :, lane].transpose(1, 2), shape.bits).transpose(1, 2).double()
            width = d // shape.value_groups
            scale = ledger.value_scale[row, :, block, :, :, i].double().repeat_interleave(width, 1).transpose(1, 2)
            zero = ledger.value_zero[row, :, block, :, :, i].double().repeat_interleave(width, 1).transpose(1, 2)
            values.append(zero + scale * codes)
            owners += [(1, lane)] * omega
        if not owners:
            continue
        logits = torch.einsum("hgd,htd->hgt", query[row], torch.cat(keys, 1)) * shape.scale
        if shape.softcap:
            logits = shape.softcap * torch.tanh(logits / shape.softcap)
        lse[row] = logits.logsumexp(-1)
        p = logits.softmax(-1)
        out[row] = torch.einsum("hgt,htd->hgd", p, torch.cat(values, 1))
        for token, (which, place) in enumerate(owners):
            masses[which][row, place] += p[..., token].mean()
    return out.reshape(pools.query.shape), lse.reshape(pools.query.shape[:2]), masses[0], masses[1]


def check(pools: Pools, tolerance: float = 2e-5) -> None:
    arena_mass, ledger_mass = pools.masses()
    out, lse = pools.plan.decode(pools.query, pools.seq_len, arena_mass=arena_mass, ledger_mass=ledger_mass)
    want_out, want_lse, want_arena, want_ledger = twin(pools)
    torch.testing.assert_close(out.double(), want_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(arena_mass.double(), want_arena, rtol=5 * tolerance, atol=1e-7)
    torch.testing.assert_close(ledger_mass.double(), want_ledger, rtol=5 * tolerance, atol=1e-7)
    plain, _ = pools.plan.decode(pools.query, pools.seq_len)
    torch.testing.assert_close(plain, out, rtol=0, atol=0)


def shape_of(**changes: object) -> Shape:
    base = Shape(
        batch=1, num_heads=6, num_kv_heads=2, head_dim=64, window_size=8, rotary_dim=64, grid_offset=3, scale=0.125
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("omega", "bits"), list(itertools.product((4, 8, 16, 32), (2, 4))))
def test_windows_and_bits(isa: str, omega: int, bits: int) -> None:
    shape = shape_of(window_size=omega, bits=bits, grid_offset=min(3, omega - 1))
    check(make(shape, blocks=9, live=37, slots=12, lanes=48, seed=omega + bits))


@pytest.mark.parametrize("group", (1, 2, 3, 4, 5, 7, 8, 9))
@pytest.mark.parametrize("bits", (2, 4))
def test_query_heads_per_kv_head(isa: str, group: int, bits: int) -> None:
    check(make(shape_of(num_heads=2 * group, bits=bits), blocks=5, live=20, slots=8, lanes=32, seed=group))


@pytest.mark.parametrize("d", (16, 64, 80, 96, 128, 256))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_head_dims_and_arena_dtypes(isa: str, d: int, dtype: torch.dtype) -> None:
    shape = shape_of(head_dim=d, rotary_dim=d, num_heads=8)
    check(make(shape, blocks=7, live=18, slots=9, lanes=32, dtype=dtype, seed=d))


@pytest.mark.parametrize("rotary_dim", (0, 6, 20, 32, 80))
def test_partial_rotary(isa: str, rotary_dim: int) -> None:
    check(make(shape_of(head_dim=80, rotary_dim=rotary_dim, rope_scale=1.25), blocks=4, live=33, slots=4, lanes=48))


@pytest.mark.parametrize("groups", (1, 2, 4))
@pytest.mark.parametrize("softcap", (0.0, 5.0))
def test_value_groups_and_softcap(isa: str, groups: int, softcap: float) -> None:
    check(make(shape_of(value_groups=groups, softcap=softcap, scale=1.0), blocks=6, live=21, slots=8, lanes=32))


@pytest.mark.parametrize("rows_per_batch", (1, 2))
@pytest.mark.parametrize("pads", ((0, 0, 0), (0, 5, 29), (13, 2, 8)))
def test_batches_with_left_padding(isa: str, rows_per_batch: int, pads: tuple[int, ...]) -> None:
    shape = shape_of(batch=3, rows_per_batch=rows_per_batch)
    check(make(shape, blocks=7, live=25, slots=8, lanes=32, pads=pads))


@pytest.mark.parametrize(("blocks", "live", "lanes"), ((1, 0, 0), (1, 0, 16), (0, 20, 32), (0, 0, 16), (9, 16, 16)))
def test_empty_parts(isa: str, blocks: int, live: int, lanes: int) -> None:
    check(make(shape_of(), blocks=blocks, live=live, slots=10, lanes=lanes, open_tokens=1))


def test_many_chunks(isa: str) -> None:
    check(make(shape_of(batch=2), blocks=70, live=150, slots=80, lanes=160))


def test_first_window_before_position_zero(isa: str) -> None:
    """A ledger window that begins before the row's first token scores only the tokens after it."""
    pools = make(shape_of(), blocks=3, live=17, slots=4, lanes=32)
    assert pools.ledger is not None
    pools.ledger.ids[0, 4] = 0
    arena_mass, ledger_mass = pools.masses()
    out, _ = pools.plan.decode(pools.query, pools.seq_len, arena_mass=arena_mass, ledger_mass=ledger_mass)
    assert torch.isfinite(out).all()
    assert float(arena_mass.sum() + ledger_mass.sum()) == pytest.approx(1.0, abs=1e-5)
    _, before = pools.plan.decode(pools.query, pools.seq_len)
    pools.ledger.value_zero[0, :, 0, :, :3, 4] = 100.0  # tokens 0..2 of that window lie before column 0
    after, lse = pools.plan.decode(pools.query, pools.seq_len)
    torch.testing.assert_close(after, out)
    torch.testing.assert_close(lse, before)


def test_masses_sum_to_one_and_are_added(isa: str) -> None:
    pools = make(shape_of(batch=2, rows_per_batch=2), blocks=9, live=40, slots=12, lanes=48)
    arena_mass, ledger_mass = pools.masses()
    for step in (1, 2):
        pools.plan.decode(pools.query, pools.seq_len, arena_mass=arena_mass, ledger_mass=ledger_mass)
        total = arena_mass.sum(1) + ledger_mass.sum(1)
        torch.testing.assert_close(total, torch.full_like(total, float(step)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("source", (torch.float32, torch.float16, torch.bfloat16))
def test_append_writes_the_open_slot(isa: str, dtype: torch.dtype, source: torch.dtype) -> None:
    pools = make(shape_of(batch=2), blocks=5, live=0, slots=6, lanes=0, dtype=dtype, rubbish=False)
    special = torch.tensor([0.0, -0.0, 1e-8, 6e-8, 5.96e-8, 60000.0, -3e-5, 1.00048828125, 1.0014648, 0.333])
    key = torch.randn(2, 2, 64)
    key[..., : len(special)] = special
    key, value = key.to(source), torch.randn(2, 2, 64).to(source)
    slot = torch.tensor([4, 2], dtype=torch.int32)
    before = pools.keys.clone()
    pools.plan.decode(pools.query, pools.seq_len, key=key, value=value, slot=slot, offset=2)
    for row in range(2):
        before[row, :, slot[row], 2] = key[row].to(dtype)
        torch.testing.assert_close(pools.values[row, :, slot[row], 2], value[row].to(dtype), rtol=0, atol=0)
    torch.testing.assert_close(pools.keys, before, rtol=0, atol=0)
    check(pools)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_low_precision_query(isa: str, dtype: torch.dtype) -> None:
    pools = make(shape_of(), blocks=5, live=20, slots=6, lanes=32)
    pools.query = pools.query.to(dtype)
    check(pools)


def test_threads_and_batches_change_nothing(isa: str) -> None:
    """A row gives the same bits with one thread, with three, and alone."""
    shape = shape_of(batch=3)
    pools = make(shape, blocks=150, live=700, slots=160, lanes=704)
    assert pools.ledger is not None
    one, lse = pools.plan.decode(pools.query, pools.seq_len)
    try:
        native.set_threads(3)
        native.share_torch_threads(False)
        for turn in range(20):
            if turn == 15:
                native.share_torch_threads(True)
            many, many_lse = pools.plan.decode(pools.query, pools.seq_len)
            assert torch.equal(one, many)
            assert torch.equal(lse, many_lse)
    finally:
        native.set_threads(1)
        native.share_torch_threads(False)
    ledger = LedgerTensors(**{f.name: getattr(pools.ledger, f.name)[:1] for f in dataclasses.fields(LedgerTensors)})
    alone = DecodePlan(dataclasses.replace(shape, batch=1), *pools.plan._tables)
    alone.bind(pools.keys[:1], pools.values[:1], pools.ids[:1], pools.count[:1], pools.pad[:1], ledger)
    out, _ = alone.decode(pools.query[:1], pools.seq_len)
    assert torch.equal(out[0], one[0])


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize(("heads", "d", "length"), ((9, 64, 1), (9, 64, 259), (24, 80, 700), (6, 128, 1030)))
def test_full_decode(isa: str, dtype: torch.dtype, heads: int, d: int, length: int) -> None:
    draw = torch.Generator().manual_seed(length)
    query = torch.randn(2, heads, d, generator=draw)
    keys, values = (torch.randn(2, 3, length, d, generator=draw).to(dtype) for _ in range(2))
    out, lse = native.full_decode(query, keys, values, scale=d**-0.5)
    logits = torch.einsum("bhgd,bhsd->bhgs", query.double().reshape(2, 3, -1, d), keys.double()) * d**-0.5
    want = torch.einsum("bhgs,bhsd->bhgd", logits.softmax(-1), values.double()).reshape(2, heads, d)
    torch.testing.assert_close(out.double(), want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1).reshape(2, heads), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("groups", (1, 3))
@pytest.mark.parametrize(("first", "pad", "softcap", "power"), ((0, 0, 0.0, 1.0), (37, 0, 4.0, 1.0), (0, 21, 0.0, 2.0)))
def test_column_masses(isa: str, groups: int, first: int, pad: int, softcap: float, power: float) -> None:
    draw = torch.Generator().manual_seed(first + pad)
    heads, kv, queries, d, omega, o = 9, 3, 411, 64, 8, 3
    keys = first + queries
    q = torch.randn(queries, heads, d, generator=draw).transpose(0, 1)  # rows apart, as a model hands them over
    k = torch.randn(kv, keys, d, generator=draw)
    logits = torch.einsum("htd,hsd->hts", q.double(), k.double().repeat_interleave(heads // kv, 0)) * 0.125
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    column = torch.arange(keys)
    hidden = (column[None] > first + torch.arange(queries)[:, None]) | (column < pad)[None]
    logits = logits.masked_fill(hidden, float("-inf"))
    lse = logits.logsumexp(-1).float()
    weights = torch.rand(queries, generator=draw) * (torch.arange(queries) > 30)
    p = torch.nan_to_num((logits - lse[..., None].double()).exp()) ** power
    column_sums = torch.einsum("hts,t->hs", p, weights.double()).reshape(groups, -1, keys).mean(1)
    blocks = (keys + o + omega - 1) // omega
    want = torch.zeros(groups, blocks, dtype=torch.float64).index_add_(1, (column + o) // omega, column_sums)
    got = native.column_masses(
        q, k, lse, scale=0.125, window_size=omega, grid_offset=o, first_query_column=first, first_column=pad,
        groups=groups, softcap=softcap, weights=weights, power=power,
    )  # fmt: skip
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-6)
    if first == pad == 0 and power == 1.0:
        whole = native.column_masses(q, k, lse, scale=0.125, window_size=omega, grid_offset=o, softcap=softcap)
        assert float(whole.sum()) == pytest.approx(queries, rel=1e-5)


@pytest.mark.parametrize(("kv", "d"), ((3, 64), (1, 80), (9, 96)))
@pytest.mark.parametrize(("first", "pad", "softcap"), ((0, 0, 0.0), (45, 0, 4.0), (0, 70, 0.0)))
def test_prefill_attention(isa: str, kv: int, d: int, first: int, pad: int, softcap: float) -> None:
    draw = torch.Generator().manual_seed(first + pad + d)
    heads, queries, omega, o = 9, 331, 8, 3
    keys = first + queries
    q = torch.randn(queries, heads, d, generator=draw).transpose(0, 1)
    k, v = (torch.randn(kv, keys, d, generator=draw) for _ in range(2))
    logits = torch.einsum("htd,hsd->hts", q.double(), k.double().repeat_interleave(heads // kv, 0)) * 0.125
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    column = torch.arange(keys)
    hidden = (column[None] > first + torch.arange(queries)[:, None]) | (column < pad)[None]
    logits = logits.masked_fill(hidden, float("-inf"))
    p = torch.nan_to_num(logits.softmax(-1))
    weights = torch.rand(queries, generator=draw)
    wanted = torch.einsum("hts,hsd->htd", p, v.double().repeat_interleave(heads // kv, 0))
    sums = torch.einsum("hts,t->hs", p, weights.double()).reshape(3, -1, keys).mean(1)
    want = torch.zeros(3, (keys + o + 7) // 8, dtype=torch.float64).index_add_(1, (column + o) // omega, sums)
    out, lse, mass = native.prefill_attention(
        q, k, v, scale=0.125, window_size=omega, grid_offset=o, first_query_column=first, first_column=pad, groups=3,
        softcap=softcap, weights=weights,
    )  # fmt: skip
    assert mass is not None
    torch.testing.assert_close(out.double(), wanted, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(mass.double(), want, rtol=2e-5, atol=1e-6)
    again, _, none = native.prefill_attention(
        q, k, v, scale=0.125, first_query_column=first, first_column=pad, softcap=softcap, masses=False
    )
    assert none is None
    assert torch.equal(again, out)


def test_wrong_tensors_are_named() -> None:
    pools = make(shape_of(), blocks=3, live=4, slots=4, lanes=16)
    with pytest.raises(BackendError, match="arena values"):
        pools.plan.bind(pools.keys, pools.values.double(), pools.ids, pools.count, pools.pad)
    with pytest.raises(BackendError, match="arena keys has shape"):
        pools.plan.bind(pools.keys, pools.values, pools.ids[:, :2].repeat(2, 1), pools.count, pools.pad)
    with pytest.raises(BackendError, match="head_dim 72"):
        DecodePlan(shape_of(head_dim=72), *rope_tables(8, 64))
    with pytest.raises(BackendError, match="together"):
        pools.plan.decode(pools.query, pools.seq_len, arena_mass=torch.zeros(1, 4))


def test_window_beyond_the_position_table() -> None:
    pools = make(shape_of(), blocks=3, live=4, slots=4, lanes=16)
    assert pools.ledger is not None
    pools.ledger.ids[0, 1] = 10_000
    with pytest.raises(BackendError, match="cos table"):
        pools.plan.decode(pools.query, pools.seq_len)


def test_missing_library_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "EXTENSION_SUFFIXES", [".absent"])
    library, why = native_library._open()
    assert library is None
    assert why is not None and "compiler" in why
    monkeypatch.setattr(native_library, "_library", None)
    monkeypatch.setattr(native_library, "_reason", why)
    assert not native.available()
    with pytest.raises(BackendError, match="cannot run on this CPU"):
        native.full_decode(torch.zeros(1, 2, 64), *(torch.zeros(1, 1, 4, 64),) * 2, scale=1.0)


def test_wish_for_an_unknown_instruction_set_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native_library.ISA_VARIABLE, "mmx")
    library, why = native_library._open()
    assert library is None
    assert why is not None and "QEVICT_ISA=mmx" in why


def test_unknown_instruction_set() -> None:
    with pytest.raises(BackendError, match="cannot run here"):
        native.use_isa("mmx")
