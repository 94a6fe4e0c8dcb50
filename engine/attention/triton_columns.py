"""Prompt scores on a CUDA device: column sums of attention from saved log-sum-exps.

One program takes a tile of keys of one query head and runs over the queries at and below the causal diagonal;
probabilities live in registers only. Knows queries, keys and blocks; knows no pools. Needs the package triton.
"""
# A kernel's arguments are tensors of the device language, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import BackendError

OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}


def constants(group: int, dim: int, wide: bool) -> dict[str, Any]:
    """What the kernel is compiled for; tiles are smaller where a row of channels is long."""
    padded = max(16, triton.next_power_of_2(dim))
    edge = 64 if padded * (2 if wide else 1) <= 128 else 32
    return {"G": group, "D": dim, "DP": padded, "TILE_K": edge, "TILE_Q": edge}


@triton.jit(do_not_specialize=["queries", "keys", "first_query", "first_key"])
def columns(
    query, key, lse, weights, mass,
    queries, keys, first_query, first_key, scale, softcap, power,
    query_head, query_row, key_head, key_row,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    TILE_K: tl.constexpr, TILE_Q: tl.constexpr, CAPPED: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Grid (query heads, tiles of keys); mass [H_q, keys] float32 is written.

    Query i stands in column first_query + i, key i in column i; keys before first_key are padding.
    """
    head = tl.program_id(0)
    tile = tl.program_id(1)
    c = tl.arange(0, DP)
    column = tile * TILE_K + tl.arange(0, TILE_K)
    known = (column < keys) & (column >= first_key)
    at = (head // G).to(tl.int64) * key_head + column.to(tl.int64)[:, None] * key_row + c[None, :]
    k = tl.load(key + at, mask=known[:, None] & (c < D)[None, :], other=0.0)
    total = tl.zeros((TILE_K,), tl.float32)
    # The first query that sees the tile's first key; earlier ones lie above the diagonal.
    begin = tl.maximum(tile * TILE_K - first_query, 0) // TILE_Q * TILE_Q
    for start in range(begin, queries, TILE_Q):
        i = start + tl.arange(0, TILE_Q)
        real = i < queries
        q_at = head.to(tl.int64) * query_head + i.to(tl.int64)[:, None] * query_row + c[None, :]
        q = tl.load(query + q_at, mask=real[:, None] & (c < D)[None, :], other=0.0)
        normal = tl.load(lse + head * queries + i, mask=real, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
        if CAPPED:
            logits = (1.0 - 2.0 / (1.0 + tl.exp(2.0 * logits / softcap))) * softcap
        seen = (real & (first_query + i >= first_key))[:, None] & known[None, :]
        seen = seen & (column[None, :] <= (first_query + i)[:, None])
        share = tl.where(seen, tl.exp(tl.where(seen, (logits - normal[:, None]) * power, 0.0)), 0.0)
        if WEIGHTED:
            share = share * tl.load(weights + i, mask=real, other=0.0)[:, None]
        total += tl.sum(share, 0)
    tl.store(mass + head.to(tl.int64) * keys + column, total, mask=column < keys)


def column_masses(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    *,
    scale: float,
    window_size: int,
    grid_offset: int = 0,
    first_query_column: int = 0,
    first_column: int = 0,
    groups: int = 1,
    softcap: float = 0.0,
    weights: Tensor | None = None,
    power: float = 1.0,
) -> Tensor:
    """Probability that each block of keys received from all prompt queries, below the causal diagonal.

    Args:
        query: [num_heads, T, d] and key: [num_kv_heads, S, d], post-RoPE, column = index for keys.
        lse: [num_heads, T], log-sum-exp of each query's logits over all the keys it saw.
        scale, softcap: as in the attention that gave `lse`; softcap 0 for none.
        window_size, grid_offset: block of column c is (c + grid_offset) // window_size.
        first_query_column: column of query 0; first_column: columns before it are padding.
        groups: decision groups of heads (1 for the layer, num_kv_heads for one per KV head).
        weights: [T] or None, a factor for every query (0 leaves it out).
        power: exponent of the probabilities before they are summed.

    Returns:
        float32 [groups, blocks], mean over the group's query heads.

    Raises:
        BackendError: shapes that do not fit each other.
    """
    heads, queries, dim = query.shape
    kv_heads, keys = key.shape[:2]
    if heads % kv_heads or heads % groups or key.shape[2] != dim or tuple(lse.shape) != (heads, queries):
        raise BackendError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, lse {tuple(lse.shape)} and {groups} groups do not fit"
        )
    query, key = _rows(query), _rows(key.to(query.dtype))
    lse = lse.float().contiguous()
    masses = torch.zeros(heads, keys, dtype=torch.float32, device=query.device)
    if queries and keys:
        weights = None if weights is None else weights.float().contiguous()
        fixed = constants(heads // kv_heads, dim, query.dtype == torch.float32)
        columns[(heads, triton.cdiv(keys, fixed["TILE_K"]))](
            query, key, lse, lse if weights is None else weights, masses,
            queries, keys, first_query_column, first_column, scale, softcap or 1.0, power,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1),
            **fixed, CAPPED=softcap > 0.0, WEIGHTED=weights is not None, **OPTIONS,
        )  # fmt: skip
    blocks = -(-(keys + grid_offset) // window_size)
    padded_masses = torch.nn.functional.pad(masses, (grid_offset, blocks * window_size - grid_offset - keys))
    per_head = padded_masses.view(heads, blocks, window_size).sum(-1)
    return per_head.view(groups, heads // groups, blocks).mean(1)


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with adjacent channels; rows and heads may lie anywhere."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
