"""INT2/INT4 codec of the Quant tier, and how codes are packed.

Asymmetric min-max (paper §2.3): keys per channel over the window's Ω tokens, on pre-RoPE keys; values
per token over the channels (or groups of them). Scale and zero are float16, and codes are computed
against them **as stored**: zero is rounded down and scale up, so that every input lies within
[zero, zero + levels·scale] and the error is at most half a step. A floor on the scale (the smallest
normal float16) keeps constant channels finite.

Packing, the one place where it is defined. Codes of one channel are packed along tokens, token t of
the window in bits (t mod n)·bits of byte t // n, n = 8 / bits; KB = Ω·bits/8 bytes per channel:

    one window, as this module returns it        in the ledger pool, windows s = 16·b + lane
    key codes    [..., d, KB]                    [..., b, d, KB, lane]      lane innermost
    key scale    [..., d]                        [..., b, d, lane]
    value codes  [..., KB, d]                    [..., s, KB, d]            channel innermost
    value scale  [..., GV, Ω]                    [..., b, GV, Ω, lane]

So a kernel reads 16 windows of one key channel, or 16 channels of one value token, with one load.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_FLOOR = 2.0**-14
LANES = 16


@dataclass(frozen=True, slots=True)
class QuantizedWindows:
    """Packed windows with any leading shape; see the module for the layout. scale and zero are float16."""

    key_codes: Tensor
    key_scale: Tensor
    key_zero: Tensor
    value_codes: Tensor
    value_scale: Tensor
    value_zero: Tensor


def _round_half(values: Tensor, *, up: bool) -> Tensor:
    """float32 → float16, rounded up or down, never to infinity."""
    half = values.clamp(-65504.0, 65504.0).to(torch.float16)
    back = half.float()
    wrong = back < values if up else back > values
    bits = half.view(torch.int16)
    grows = (bits >= 0) if up else (bits < 0)
    step = torch.where(grows, 1, -1).to(torch.int16)
    moved = bits + step
    # Stepping off +0 downwards or -0 upwards crosses into the other sign's smallest subnormal.
    tiny = torch.full((), 1 if up else -32767, dtype=torch.int16, device=values.device)
    moved = torch.where(back == 0, tiny, moved)
    out = torch.where(wrong, moved, bits).view(torch.float16)
    return torch.where(out.isfinite(), out, half)


def min_max_grid(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(scale, zero) in float16 that cover [low, high]."""
    zero = _round_half(low, up=False)
    step = (high - zero.float()) / (2**bits - 1)
    return _round_half(step.clamp_min(SCALE_FLOOR), up=True), zero


def encode(values: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Codes 0 … 2^bits - 1 against scale and zero as stored, uint8, in the shape of `values`."""
    return ((values - zero.float()) / scale.float()).round_().clamp_(0, 2**bits - 1).to(torch.uint8)


def _pack(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Packs along `dim`, whose length is a multiple of 8 / bits; the packed axis stays in place."""
    per_byte = 8 // bits
    moved = codes.movedim(dim, -1)
    grouped = moved.reshape(*moved.shape[:-1], moved.shape[-1] // per_byte, per_byte)
    packed = grouped[..., 0].clone()
    for place in range(1, per_byte):
        packed |= grouped[..., place] << (place * bits)
    return packed.movedim(-1, dim).contiguous()


def unpack(packed: Tensor, bits: int, dim: int) -> Tensor:
    """uint8 codes from packed bytes; axis `dim` grows by 8 / bits."""
    per_byte = 8 // bits
    dim = dim % packed.dim()
    mask = 2**bits - 1
    parts = [(packed >> (place * bits)) & mask for place in range(per_byte)]
    return torch.stack(parts, dim=dim + 1).flatten(dim, dim + 1)


def quantize(key: Tensor, value: Tensor, bits: int, value_groups: int = 1) -> QuantizedWindows:
    """Packs windows (paper §2.3).

    Args:
        key: pre-RoPE keys [..., Ω, d], any float type.
        value: values [..., Ω, d].
        bits: 2 or 4.
        value_groups: channel groups of a value token; 1 = the paper's.
    """
    key, value = key.float(), value.float()
    k_scale, k_zero = min_max_grid(key.amin(-2), key.amax(-2), bits)
    k_codes = encode(key, k_scale.unsqueeze(-2), k_zero.unsqueeze(-2), bits)
    grouped = value.reshape(*value.shape[:-1], value_groups, value.shape[-1] // value_groups)
    v_scale, v_zero = min_max_grid(grouped.amin(-1), grouped.amax(-1), bits)  # [..., Ω, GV]
    v_codes = encode(grouped, v_scale.unsqueeze(-1), v_zero.unsqueeze(-1), bits).flatten(-2)
    return QuantizedWindows(
        key_codes=_pack(k_codes, bits, -2).transpose(-1, -2).contiguous(),
        key_scale=k_scale,
        key_zero=k_zero,
        value_codes=_pack(v_codes, bits, -2),
        value_scale=v_scale.transpose(-1, -2).contiguous(),
        value_zero=v_zero.transpose(-1, -2).contiguous(),
    )


def dequantize(windows: QuantizedWindows, bits: int) -> tuple[Tensor, Tensor]:
    """(pre-RoPE keys, values), both float32 [..., Ω, d]."""
    k = unpack(windows.key_codes, bits, -1).transpose(-1, -2).float()  # [..., Ω, d]
    key = windows.key_zero.float().unsqueeze(-2) + windows.key_scale.float().unsqueeze(-2) * k
    v = unpack(windows.value_codes, bits, -2).float()
    groups = windows.value_scale.shape[-2]
    v = v.reshape(*v.shape[:-1], groups, v.shape[-1] // groups)
    scale = windows.value_scale.float().transpose(-1, -2).unsqueeze(-1)  # [..., Ω, GV, 1]
    zero = windows.value_zero.float().transpose(-1, -2).unsqueeze(-1)
    return key, (zero + scale * v).flatten(-2)
