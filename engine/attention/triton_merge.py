"""Triton kernel that ends a decode step: one softmax from the partial results, and the windows' masses.

Each program works out the log-sum-exps that it needs from the partials, so that merging and scoring are one
launch, and no score is added to by two programs. Knows partials and scores as tensors. Needs the package triton.
"""
# A kernel's arguments are tensors of the device language, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from engine.attention.triton_decode import LOG2E, NEG, PLAIN


@triton.jit
def _joint_lse(part_lse, n, parts, G: tl.constexpr, GP: tl.constexpr, PP: tl.constexpr):
    """Base-2 log-sum-exp of head n's query heads over all splits, [GP]."""
    g = tl.arange(0, GP)
    i = tl.arange(0, PP)
    each = tl.load(
        part_lse + (n * parts + i)[:, None] * G + g[None, :],
        mask=(i < parts)[:, None] & (g < G)[None, :],
        other=NEG,
    )
    top = tl.max(each, 0)
    return top + tl.log2(tl.sum(tl.exp2(each - top[None, :]), 0))


@triton.jit(do_not_specialize=PLAIN)
def merge(
    part_out, part_lse, out, lse,
    raw_arena, arena_scores, arena_count, raw_ledger, ledger_scores, live_count,
    slots, places, arena_tiles, parts,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HD: tl.constexpr,
    PP: tl.constexpr, TILE: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """Grid (decision rows, HD + tiles of slots): programs below HD merge a KV head, the others add masses.

    out [B·H_q, D]; lse [B·H_q], natural. A slot's score grows by the mean over the row's query heads.
    """
    row = tl.program_id(0)
    task = tl.program_id(1)
    g = tl.arange(0, GP)
    if task < HD:
        n = row * HD + task
        c = tl.arange(0, DP)
        joint = _joint_lse(part_lse, n, parts, G, GP, PP)
        total = tl.zeros((GP, DP), tl.float32)
        inside = (g < G)[:, None] & (c < D)[None, :]
        for i in range(parts):
            at = n * parts + i
            weight = tl.exp2(tl.load(part_lse + at * G + g, mask=g < G, other=NEG) - joint)
            part = tl.load(part_out + (at * G + g)[:, None] * D + c[None, :], mask=inside, other=0.0)
            total += weight[:, None] * part
        tl.store(out + (n * G + g)[:, None] * D + c[None, :], total.to(out.dtype.element_ty), mask=inside)
        tl.store(lse + n * G + g, joint / LOG2E, mask=g < G)
    elif MASS:
        tile = task - HD
        if tile < arena_tiles:
            _add_masses(
                part_lse, raw_arena, arena_scores, row, tile, tl.load(arena_count + row), slots, parts,
                G, GP, HD, PP, TILE,
            )  # fmt: skip
        else:
            _add_masses(
                part_lse, raw_ledger, ledger_scores, row, tile - arena_tiles, tl.load(live_count + row), places, parts,
                G, GP, HD, PP, TILE,
            )  # fmt: skip


@triton.jit
def _add_masses(
    part_lse, raw, scores, row, tile, count, width, parts,
    G: tl.constexpr, GP: tl.constexpr, HD: tl.constexpr, PP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Adds one tile of a decision row's window masses to its scores."""
    if tile * TILE < count:
        g = tl.arange(0, GP)
        slot = tile * TILE + tl.arange(0, TILE)
        held = slot < count
        total = tl.zeros((TILE,), tl.float32)
        for h in range(HD):
            n = row * HD + h
            joint = _joint_lse(part_lse, n, parts, G, GP, PP)
            each = tl.load(
                raw + (n * G + g)[:, None].to(tl.int64) * width + slot[None, :],
                mask=(g < G)[:, None] & held[None, :],
                other=NEG,
            )
            share = tl.exp2(each - joint[:, None])
            total += tl.sum(tl.where((g < G)[:, None], share, 0.0), 0)
        to = scores + row * width + slot
        tl.store(to, tl.load(to, mask=held, other=0.0) + total / (HD * G), mask=held)
