"""Attention over live ledger entries in plain torch, straight from the packed lane layout.

Codes are unpacked, dequantized and rotated in the layout they lie in (16 windows side by side), so
that no key is transposed. It is the fallback where the compiled kernel cannot run, and costs several
times the attention itself; the kernel does the same in one pass. Knows no model.
"""

from __future__ import annotations

from torch import Tensor

from engine.attention.softmax import NO_KEYS
from engine.attention.state import KVState
from engine.quant import LANES, unpack


def ledger_keys(state: KVState, layer: int, blocks: int, layers: int = 1) -> Tensor:
    """Post-RoPE keys of the first `blocks` lane blocks, float32 [R, heads, NB, d, Ω, lane]; R rows of the layers."""
    store, part = state.pool, state.layer_slice(layer, layers)
    codes = unpack(store.key_codes[part, :, :blocks], state.config.bits, -2).float()
    scale = store.key_scale[part, :, :blocks].float().unsqueeze(-2)
    key = codes.mul_(scale).add_(store.key_zero[part, :, :blocks].float().unsqueeze(-2))
    positions = ledger_positions(state, layer, blocks, layers)
    rope, half = state.rope, state.rope.half
    # [R, NB, lane, Ω, r] -> [R, 1, NB, r, Ω, lane]
    cos = rope.cos[positions].permute(0, 1, 4, 3, 2).unsqueeze(1) * rope.scale
    sin = rope.sin[positions].permute(0, 1, 4, 3, 2).unsqueeze(1) * rope.scale
    low, high = key[:, :, :, :half], key[:, :, :, half : 2 * half]
    rotated = low * cos - high * sin
    high.mul_(cos).add_(low * sin)
    low.copy_(rotated)
    return key


def ledger_positions(state: KVState, layer: int, blocks: int, layers: int = 1) -> Tensor:
    """Positions of all tokens in lane blocks, int64 [R, NB, lane, Ω]; 0 where a lane is idle."""
    store, part = state.pool, state.layer_slice(layer, layers)
    ids = store.ledger_ids[part, : blocks * LANES].clamp_min(0)
    shift = state.row_shift[part]
    columns = store.columns(ids) - shift[:, None, None]
    return columns.clamp_min(0).view(ids.shape[0], blocks, LANES, -1)


def ledger_logits(
    state: KVState, layer: int, query: Tensor, *, scale: float, softcap: float | None, layers: int = 1
) -> tuple[Tensor, int]:
    """Logits of query [layers·B, H_q, T, d] on live entries of one layer, or of several from it on.

    Returns:
        ([R, heads, NB, g·T, Ω, lane], idle lanes at `NO_KEYS`; NB).
    """
    store, part, shape = state.pool, state.layer_slice(layer, layers), state.shape
    blocks = -(-state.live_used // LANES)
    key = ledger_keys(state, layer, blocks, layers)
    tokens = query.shape[2]
    rows = layers * shape.rows_per_layer
    grouped = query.float().reshape(rows, shape.heads, 1, state.group_heads * tokens, shape.head_dim)
    logits = (grouped @ key.flatten(-2)) * scale
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.unflatten(-1, (state.config.window_size, LANES))
    idle = store.ledger_ids[part, : blocks * LANES].view(-1, 1, blocks, 1, 1, LANES) < 0
    return logits.masked_fill_(idle, NO_KEYS), blocks


def attend_ledger(
    state: KVState, layer: int, query: Tensor, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """(out [B, H_q, T, d] float32, lse [B, H_q, T]) over live entries of one layer."""
    store, part, shape = state.pool, state.layer_slice(layer), state.shape
    logits, blocks = ledger_logits(state, layer, query, scale=scale, softcap=softcap)
    lse = logits.amax((2, 4, 5), keepdim=True)
    weights = logits.sub_(lse).exp_()
    total = weights.sum((2, 4, 5), keepdim=True)
    lse = lse + total.log()
    # Fold the value scale into the weights: out_c = Σ (w·s)·code_c + Σ w·z.
    groups = store.value_groups
    v_scale = store.value_scale[part, :, :blocks].float()  # [R, heads, NB, GV, Ω, lane]
    v_zero = store.value_zero[part, :, :blocks].float()
    codes = unpack(store.value_codes[part, :, : blocks * LANES], state.config.bits, -2).float()
    codes = codes.unflatten(-1, (groups, -1))  # [R, heads, places, Ω, GV, d/GV]
    scaled = weights.unsqueeze(4) * v_scale.unsqueeze(3)  # [R, heads, NB, gT, GV, Ω, lane]
    scaled = scaled.permute(0, 1, 4, 3, 2, 6, 5).flatten(-3)  # [R, heads, GV, gT, places·Ω]
    out = scaled @ codes.flatten(2, 3).transpose(2, 3)  # [R, heads, GV, gT, d/GV]
    shift = (weights.unsqueeze(4) * v_zero.unsqueeze(3)).sum((2, 5, 6))  # [R, heads, gT, GV]
    out = out.permute(0, 1, 3, 2, 4) + shift.unsqueeze(-1)
    out = out.flatten(-2) / total.reshape(*out.shape[:3], 1)
    tokens = query.shape[2]
    heads = shape.num_kv_heads * state.group_heads
    return out.reshape(shape.batch, heads, tokens, -1), lse.reshape(shape.batch, heads, tokens)
