"""Triton kernels of one decode step: append, attend over arena and packed codes, merge, window masses.

Four launches (the last is in `triton_merge.py`), none of which waits for the host. How full the pools are,
how many columns are known and where the newest token goes is read from device memory, so any grid is correct
and a captured step can be replayed; host integers only say how many programs share the work.

    prepare   writes the newest key and value; turns the query back by each offset of a window
    arena     full-precision slots: partial output and log-sum-exp per split, log-mass per head and slot
    ledger    packed codes: the same; lane = window, the window's base position turns scale and zero once
    merge     one softmax from the partials; log-masses, normalised, are added to the windows' scores

A pre-RoPE key k at position base + j gives  q·R(base + j)k = (R(-j)q)·(R(base)k): exact. The pools keep
separate kernels, for registers. Logarithms are base 2 inside. Layouts: see `quant.py` and `tiers.py`.
Knows pools as tensors; knows nothing of tiers, budgets, routing or models. Needs the package triton.
"""
# A kernel's arguments are tensors of the device language, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

NEG: tl.constexpr = tl.constexpr(-1e30)
"""Logit of what may not be seen: finite, so that a split that sees nothing makes no NaN."""
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LANES: tl.constexpr = tl.constexpr(16)


def _unpack(shift: int, mask: int, ones: int, rest: int, low: int, high: int) -> str:
    """PTX: four bytes, shifted, masked, with `ones` set, spread over two pairs of float16 with byte `rest`."""
    return (
        f"{{ .reg .b32 t; shr.b32 t, $2, {shift}; lop3.b32 t, t, {mask}, {ones}, 0xEA; "
        f"prmt.b32 $0, t, {rest}, {low}; prmt.b32 $1, t, {rest}, {high}; }}"
    )


_TWO_BITS: tl.constexpr = tl.constexpr(
    tuple(_unpack(2 * place, 0x03030303, 0x3C3C3C3C, 0, 0x1404, 0x3424) for place in range(4))
)
_FOUR_BITS: tl.constexpr = tl.constexpr(
    tuple(_unpack(4 * place, 0x0F0F0F0F, 0, 0x64646464, 0x4140, 0x4342) for place in range(2))
)


PLAIN = [
    *("arena_ids", "arena_count", "pads", "clock", "ledger_ids", "live_count", "shift", "arena_scores"),
    *("ledger_scores", "slots", "parts", "first_part", "blocks", "places", "arena_tiles"),
]
"""Arguments whose value and alignment differ between layers and events: one compiled kernel serves them all."""


@triton.jit
def _capped(logits, softcap, CAPPED: tl.constexpr):
    """Base-2 logits; without a cap the factor lies in the query already."""
    if CAPPED:
        # tanh x = 1 - 2 / (1 + exp 2x), and exp may run over to infinity.
        logits = (1.0 - 2.0 / (1.0 + tl.exp(2.0 * logits / softcap))) * softcap * LOG2E
    return logits


@triton.jit
def _code(packed, PLACE: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """Codes c at place PLACE of packed bytes as numbers of type KIND; as 1 + c/4 where BITS is 2 and KIND float16.

    In float16 the code is put into the mantissa, so that nothing is converted. ASM does so for four bytes at once;
    it is called impure so that the compiler unpacks before it lays the tile out for the dot product, where four
    neighbouring lanes share a register, and not afterwards.
    """
    if tl.float32 == KIND:
        code = ((packed >> (PLACE * BITS)) & ((1 << BITS) - 1)).to(tl.float32)
    elif BITS == 2:
        if ASM:
            code = tl.inline_asm_elementwise(
                _TWO_BITS[PLACE], "=r,=r,r", [packed], dtype=tl.float16, is_pure=False, pack=4
            )
        else:
            code = ((((packed >> (PLACE * 2)) & 3) | 0x3C).to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        if ASM:
            code = tl.inline_asm_elementwise(
                _FOUR_BITS[PLACE], "=r,=r,r", [packed], dtype=tl.float16, is_pure=False, pack=4
            )
        else:
            code = (((packed >> (PLACE * 4)) & 15).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
        code = code - 1024.0
    return code


@triton.jit
def _number(code, UNIT: tl.constexpr):
    """The code itself, exactly, where `_code` gives 1 + c/4."""
    if UNIT > 1:
        code = code * UNIT - UNIT
    return code


@triton.jit(do_not_specialize=PLAIN)
def prepare(
    query, key, value,
    arena_key, arena_value, arena_count, clock,
    cos, sin, turned,
    slots, scale,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    HALF: tl.constexpr, HP: tl.constexpr, ROPE_SCALE: tl.constexpr,
    HD: tl.constexpr, OMEGA: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Grid (B·H_kv, Ω). Program (n, 0) appends head n's token; program (n, j) turns its queries back by j.

    turned [B·H_kv, Ω, G, D], in the type of the ledger's dot products, times the softmax scale.
    """
    n = tl.program_id(0)
    j = tl.program_id(1)
    c = tl.arange(0, DP)
    if j == 0:
        inside = (tl.load(clock) - 1 + OFFSET) % OMEGA
        slot = tl.load(arena_count + n // HD) - 1
        to = ((n.to(tl.int64) * slots + slot) * OMEGA + inside) * D + c
        if slot >= 0:
            new_key = tl.load(key + n * D + c, mask=c < D, other=0.0)
            new_value = tl.load(value + n * D + c, mask=c < D, other=0.0)
            tl.store(arena_key + to, new_key.to(arena_key.dtype.element_ty), mask=c < D)
            tl.store(arena_value + to, new_value.to(arena_value.dtype.element_ty), mask=c < D)
    g = tl.arange(0, GP)
    r = tl.arange(0, HP)
    at = (n * G + g)[:, None] * D + r[None, :]
    seen = (g < G)[:, None] & (r < HALF)[None, :]
    low = tl.load(query + at, mask=seen, other=0.0).to(tl.float32)
    high = tl.load(query + at + HALF, mask=seen, other=0.0).to(tl.float32)
    turn = r < HALF
    cosine = tl.load(cos + j * HALF + r, mask=turn, other=0.0)[None, :] * (scale * ROPE_SCALE)
    sine = tl.load(sin + j * HALF + r, mask=turn, other=0.0)[None, :] * (scale * ROPE_SCALE)
    to = ((n * OMEGA + j) * G + g)[:, None] * D + r[None, :]
    kind = turned.dtype.element_ty
    tl.store(turned + to, (low * cosine + high * sine).to(kind), mask=seen)
    tl.store(turned + to + HALF, (high * cosine - low * sine).to(kind), mask=seen)
    if D > 2 * HALF:
        seen = (g < G)[:, None] & ((c >= 2 * HALF) & (c < D))[None, :]
        plain = tl.load(query + (n * G + g)[:, None] * D + c[None, :], mask=seen, other=0.0).to(tl.float32)
        to = ((n * OMEGA + j) * G + g)[:, None] * D + c[None, :]
        tl.store(turned + to, (plain * scale).to(kind), mask=seen)


@triton.jit(do_not_specialize=PLAIN)
def arena(
    query, arena_key, arena_value, arena_ids, arena_count, pads, clock,
    part_out, part_lse, raw,
    slots, scale, softcap, parts,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    HD: tl.constexpr, OMEGA: tl.constexpr, OFFSET: tl.constexpr,
    TOKENS: tl.constexpr, WIDE: tl.constexpr, CAPPED: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """Grid (B·H_kv, splits): every splits-th tile of TOKENS tokens of the occupied slots.

    part_out [B·H_kv, parts, G, D] and part_lse [B·H_kv, parts, G] get entry `split`; raw [B·H_kv·G, slots].
    WIDE: float32 products instead of the arena's own type.
    """
    n = tl.program_id(0)
    split = tl.program_id(1)
    row = n // HD
    count = tl.load(arena_count + row)
    pad = tl.load(pads + row)
    columns = tl.load(clock)
    g = tl.arange(0, GP)
    c = tl.arange(0, DP)
    heads = g < G
    channels = c < D
    kind: tl.constexpr = tl.float32 if WIDE else arena_key.dtype.element_ty
    q = tl.load(query + (n * G + g)[:, None] * D + c[None, :], mask=heads[:, None] & channels[None, :], other=0.0)
    q = q.to(kind)
    top = tl.full((GP,), NEG, tl.float32)
    total = tl.zeros((GP,), tl.float32)
    out = tl.zeros((GP, DP), tl.float32)
    first = n.to(tl.int64) * slots * OMEGA
    for tile in range(split, tl.cdiv(count * OMEGA, TOKENS), tl.num_programs(1)):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        slot = token // OMEGA
        held = slot < count
        block = tl.load(arena_ids + row * slots + slot, mask=held, other=-1)
        column = block * OMEGA + token % OMEGA - OFFSET
        seen = held & (block >= 0) & (column >= pad) & (column >= 0) & (column < columns)
        at = (first + token)[:, None] * D + c[None, :]
        inside = seen[:, None] & channels[None, :]
        key = tl.load(arena_key + at, mask=inside, other=0.0).to(kind)
        value = tl.load(arena_value + at, mask=inside, other=0.0).to(kind)
        logits = tl.dot(q, tl.trans(key), input_precision="tf32x3") * scale
        logits = tl.where(seen[None, :], _capped(logits, softcap, CAPPED), NEG)
        new_top = tl.maximum(top, tl.max(logits, 1))
        fade = tl.exp2(top - new_top)
        p = tl.where(seen[None, :], tl.exp2(logits - new_top[:, None]), 0.0)
        total = total * fade + tl.sum(p, 1)
        out = tl.dot(p.to(kind), value, out * fade[:, None], input_precision="tf32x3")
        top = new_top
        if MASS:
            window = tl.sum(tl.reshape(p, (GP, TOKENS // OMEGA, OMEGA)), 2)
            window = tl.where(window > 0.0, top[:, None] + tl.log2(tl.maximum(window, 1e-37)), NEG)
            to = tile * (TOKENS // OMEGA) + tl.arange(0, TOKENS // OMEGA)
            tl.store(
                raw + (n * G + g)[:, None] * slots + to[None, :],
                window,
                mask=heads[:, None] & (to < count)[None, :],
            )
    _store_part(part_out, part_lse, n * parts + split, top, total, out, G, GP, D, DP)


@triton.jit
def _store_part(
    part_out, part_lse, place, top, total, out,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """A split's output and base-2 log-sum-exp."""
    g = tl.arange(0, GP)
    c = tl.arange(0, DP)
    some = total > 0.0
    lse = tl.where(some, top + tl.log2(tl.maximum(total, 1e-37)), NEG)
    out = out / tl.where(some, total, 1.0)[:, None]
    tl.store(part_lse + place * G + g, lse, mask=g < G)
    tl.store(
        part_out + (place * G + g)[:, None] * D + c[None, :],
        out,
        mask=(g < G)[:, None] & (c < D)[None, :],
    )


@triton.jit(do_not_specialize=PLAIN)
def ledger(
    turned, key_codes, key_scale, key_zero, value_codes, value_scale, value_zero,
    ledger_ids, live_count, shift, cos, sin,
    part_out, part_lse, raw,
    blocks, softcap, parts, first_part,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    HALF: tl.constexpr, HP: tl.constexpr, RP: tl.constexpr,
    HD: tl.constexpr, OMEGA: tl.constexpr, OFFSET: tl.constexpr, BITS: tl.constexpr, GV: tl.constexpr,
    WINDOWS: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr, MASS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid (B·H_kv, splits): every splits-th tile of WINDOWS live windows, CHUNK tokens of each at a time.

    `turned` says by its type in what the products are done: float16 or float32. Partials go to entry
    first_part + split; raw is [B·H_kv·G, blocks·16].
    """
    n = tl.program_id(0)
    split = tl.program_id(1)
    row = n // HD
    live = tl.load(live_count + row)
    move = tl.load(shift + row)
    kind: tl.constexpr = turned.dtype.element_ty
    KB: tl.constexpr = OMEGA * BITS // 8
    PER: tl.constexpr = 8 // BITS
    UNIT: tl.constexpr = 4 if BITS == 2 and kind != tl.float32 else 1  # codes are 1 + c/UNIT, or c itself
    g = tl.arange(0, GP)
    r = tl.arange(0, HP)
    c = tl.arange(0, DP)
    w = tl.arange(0, WINDOWS)
    lane = w % LANES
    heads = (g < G)[:, None]
    pair = (r < HALF)[:, None]
    channels = (c < D)[None, :]
    top = tl.full((GP,), NEG, tl.float32)
    total = tl.zeros((GP,), tl.float32)
    out = tl.zeros((GP, DP), tl.float32)
    floor = tl.zeros((GP,), tl.float32)
    for tile in range(split, tl.cdiv(live, WINDOWS), tl.num_programs(1)):
        place = tile * WINDOWS + w
        alive = place < live
        lane_block = tile * (WINDOWS // LANES) + w // LANES
        stored = pair if WINDOWS == LANES else pair & (lane_block < blocks)[None, :]
        held = n.to(tl.int64) * blocks + lane_block
        block = tl.load(ledger_ids + row * (blocks * LANES) + place, mask=alive, other=0)
        base = block * OMEGA - OFFSET - move
        position = tl.abs(base)
        turn = position[None, :] * HALF + r[:, None]
        cosine = tl.load(cos + turn, mask=pair, other=0.0)
        sine = tl.load(sin + turn, mask=pair, other=0.0)
        sine = tl.where((base < 0)[None, :], -sine, sine)
        at = (held[None, :] * D + r[:, None]) * LANES + lane[None, :]
        scale_low = tl.load(key_scale + at, mask=stored, other=0.0).to(tl.float32)
        scale_high = tl.load(key_scale + at + HALF * LANES, mask=stored, other=0.0).to(tl.float32)
        zero_low = tl.load(key_zero + at, mask=stored, other=0.0).to(tl.float32)
        zero_high = tl.load(key_zero + at + HALF * LANES, mask=stored, other=0.0).to(tl.float32)
        low_low = (scale_low * cosine * UNIT).to(kind)
        low_high = (scale_high * sine * UNIT).to(kind)
        high_high = (scale_high * cosine * UNIT).to(kind)
        high_low = (scale_low * sine * UNIT).to(kind)
        low_zero = zero_low * cosine - zero_high * sine
        high_zero = zero_high * cosine + zero_low * sine
        if UNIT > 1:  # with the factors as rounded, so that only the codes' part of them errs
            low_zero += low_high.to(tl.float32) - low_low.to(tl.float32)
            high_zero -= high_high.to(tl.float32) + high_low.to(tl.float32)
        low_zero = low_zero.to(kind)
        high_zero = high_zero.to(kind)
        code_at = (held[None, :] * D + r[:, None]) * (KB * LANES) + lane[None, :]
        value_at = (n.to(tl.int64) * (blocks * LANES) + place)[:, None] * (KB * D) + c[None, :]
        kept = channels if WINDOWS == LANES else channels & (place < blocks * LANES)[:, None]
        mass = tl.zeros((GP, WINDOWS), tl.float32)
        for chunk in range(OMEGA // CHUNK):
            logits = ()
            for k in tl.static_range(CHUNK * BITS // 8):
                byte = chunk * (CHUNK * BITS // 8) + k
                packed_low = tl.load(key_codes + code_at + byte * LANES, mask=stored, other=0)
                packed_high = tl.load(key_codes + code_at + (byte * LANES + HALF * KB * LANES), mask=stored, other=0)
                for p in tl.static_range(PER):
                    x = _code(packed_low, p, BITS, kind, ASM)
                    y = _code(packed_high, p, BITS, kind, ASM)
                    low = x * low_low + (low_zero - y * low_high)
                    high = y * high_high + (x * high_low + high_zero)
                    q_at = ((n * OMEGA + byte * PER + p) * G + g)[:, None] * D + r[None, :]
                    q_low = tl.load(turned + q_at, mask=heads & (r < HALF)[None, :], other=0.0)
                    q_high = tl.load(turned + q_at + HALF, mask=heads & (r < HALF)[None, :], other=0.0)
                    s = tl.dot(q_low, low, input_precision="tf32x3")
                    s = tl.dot(q_high, high, s, input_precision="tf32x3")
                    if RP > 0:
                        s = _straight(
                            s, turned, key_codes, key_scale, key_zero, held, lane, byte, lane_block < blocks,
                            (n * OMEGA + byte * PER + p) * G, p, G, GP, D, HALF, RP, KB, BITS, UNIT, ASM,
                        )  # fmt: skip
                    logits = logits + (tl.where(alive[None, :], _capped(s, softcap, CAPPED), NEG),)  # noqa: RUF005
            peak = logits[0]
            for i in tl.static_range(1, CHUNK):
                peak = tl.maximum(peak, logits[i])
            new_top = tl.maximum(top, tl.max(peak, 1))
            fade = tl.exp2(top - new_top)
            top = new_top
            out = out * fade[:, None]
            mass = mass * fade[:, None]
            lifted = tl.zeros((GP, WINDOWS), tl.float32)
            for k in tl.static_range(CHUNK * BITS // 8):
                byte = chunk * (CHUNK * BITS // 8) + k
                packed = tl.load(value_codes + value_at + byte * D, mask=kept, other=0)
                for p in tl.static_range(PER):
                    weight = tl.where(alive[None, :], tl.exp2(logits[k * PER + p] - top[:, None]), 0.0)
                    mass += weight
                    token = byte * PER + p
                    if GV == 1:
                        meta = (held * OMEGA + token) * LANES + lane
                        step = tl.load(value_scale + meta, mask=alive, other=0.0).to(tl.float32)
                        bottom = tl.load(value_zero + meta, mask=alive, other=0.0).to(tl.float32)
                        lifted += weight * bottom[None, :]
                        scaled = (weight * (step * UNIT)[None, :]).to(kind)
                        if UNIT > 1:
                            lifted -= scaled.to(tl.float32)
                        value = _code(packed, p, BITS, kind, ASM)
                        out = tl.dot(scaled, value, out, input_precision="tf32x3")
                    else:
                        group = c // (D // GV)
                        meta = ((held[:, None] * GV + group[None, :]) * OMEGA + token) * LANES + lane[:, None]
                        some = alive[:, None] & channels
                        step = tl.load(value_scale + meta, mask=some, other=0.0).to(kind)
                        bottom = tl.load(value_zero + meta, mask=some, other=0.0).to(kind)
                        value = _number(_code(packed, p, BITS, kind, ASM), UNIT) * step + bottom
                        out = tl.dot(weight.to(kind), value, out, input_precision="tf32x3")
            total = total * fade
            floor = floor * fade + tl.sum(lifted, 1)
        total += tl.sum(mass, 1)
        if MASS:
            window = tl.where(mass > 0.0, top[:, None] + tl.log2(tl.maximum(mass, 1e-37)), NEG)
            tl.store(
                raw + (n * G + g)[:, None] * (blocks * LANES) + place[None, :],
                window,
                mask=heads & alive[None, :],
            )
    _store_part(part_out, part_lse, n * parts + first_part + split, top, total, out + floor[:, None], G, GP, D, DP)


@triton.jit
def _straight(
    s, turned, key_codes, key_scale, key_zero, held, lane, byte, inside, query_row, PLACE: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, RP: tl.constexpr,
    KB: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Adds the logits of channels that carry no position, 2·HALF … D-1."""
    kind: tl.constexpr = turned.dtype.element_ty
    g = tl.arange(0, GP)
    r = 2 * HALF + tl.arange(0, RP)
    stored = (r < D)[:, None] & inside[None, :]
    at = (held[None, :] * D + r[:, None]) * LANES + lane[None, :]
    step = tl.load(key_scale + at, mask=stored, other=0.0).to(kind)
    bottom = tl.load(key_zero + at, mask=stored, other=0.0).to(kind)
    code_at = (held[None, :] * D + r[:, None]) * (KB * LANES) + lane[None, :] + byte * LANES
    packed = tl.load(key_codes + code_at, mask=stored, other=0)
    q_at = (query_row + g)[:, None] * D + r[None, :]
    q = tl.load(turned + q_at, mask=(g < G)[:, None] & (r < D)[None, :], other=0.0)
    key = _number(_code(packed, PLACE, BITS, kind, ASM), UNIT) * step + bottom
    return tl.dot(q, key, s, input_precision="tf32x3")
