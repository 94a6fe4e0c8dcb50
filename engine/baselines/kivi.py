"""KIVI: everything stays, in 2 or 4 bits; keys per channel, values per token, a recent residual in full.

Codes are packed and grids stored in float16; nothing is ever quantized twice. Keys are quantized as the
model hands them out, after RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.baselines.base import MASKED, Context, Resident, Rival, RunPlan, Staged, full_attend, require
from engine.baselines.packing import minmax, pack, unpack, without_padding
from engine.budget import KVShape
from engine.errors import ConfigError
from engine.trace import Tier


class Grown:
    """A tensor that grows along one axis, and a view of what is occupied."""

    def __init__(self, like: Tensor, dim: int, room: int) -> None:
        self.dim, self.used = dim, 0
        size = list(like.shape)
        size[dim] = max(room, like.shape[dim])
        self._store = like.new_empty(size)
        self.add(like)

    def add(self, new: Tensor) -> None:
        """Appends along the axis."""
        count = new.shape[self.dim]
        more = self.used + count - self._store.shape[self.dim]
        if more > 0:
            size = list(self._store.shape)
            size[self.dim] = max(more, 16)
            self._store = torch.cat([self._store, self._store.new_empty(size)], self.dim)
        self._store.narrow(self.dim, self.used, count).copy_(new)
        self.used += count

    @property
    def view(self) -> Tensor:
        """What is occupied."""
        return self._store.narrow(self.dim, 0, self.used)

    def select(self, rows: Tensor) -> None:
        self._store = self._store.index_select(0, rows)


class KiviLayer(Resident):
    """Sinks in full, then a stream of packed tokens, then the residual.

    key_codes [B, H, groups, g·b/8, d], key_scale and key_zero [B, H, groups, d]; value_codes [B, H, T_v, d·b/8],
    value_scale and value_zero [B, H, T_v, d/g]; residuals [B, H, ≤ R, d].
    """

    def __init__(self, kivi: Kivi, part: Staged, context: Context) -> None:
        self._bits, self._group, self._span = kivi.bits, kivi.group_size, kivi.residual
        self._pads, self._dtype = torch.tensor(context.pads, device=part.key.device), context.dtype
        self._padded = any(context.pads)
        self.flushes = 0
        key, value = without_padding(part.key, context.pads), without_padding(part.value, context.pads)
        self._sinks = min(kivi.sinks, key.shape[2])
        self._wanted_sinks = kivi.sinks
        self.sink_key = key[:, :, : self._sinks].to(self._dtype).clone()
        self.sink_value = value[:, :, : self._sinks].to(self._dtype).clone()
        self._columns = self._sinks
        batch, heads, _, dim = key.shape
        room = max(0, context.columns + context.run.planned_new_tokens - self._sinks)
        blank = part.key.new_empty(batch, heads, 0, dim, dtype=self._dtype)
        self._key_rest, self._value_rest = blank, blank.clone()
        codes = blank.new_empty(batch, heads, 0, self._group * self._bits // 8, dim, dtype=torch.uint8)
        grid = blank.new_empty(batch, heads, 0, dim, dtype=torch.float16)
        groups = room // self._span * (self._span // self._group)
        self._key_codes = Grown(codes, 2, groups)
        self._key_scale, self._key_zero = Grown(grid, 2, groups), Grown(grid, 2, groups)
        tokens = max(0, room - self._span)
        codes = blank.new_empty(batch, heads, 0, dim * self._bits // 8, dtype=torch.uint8)
        grid = blank.new_empty(batch, heads, 0, dim // self._group, dtype=torch.float16)
        self._value_codes = Grown(codes, 2, tokens)
        self._value_scale, self._value_zero = Grown(grid, 2, tokens), Grown(grid, 2, tokens)
        self._stream(key[:, :, self._sinks :], value[:, :, self._sinks :])

    def append(self, key: Tensor, value: Tensor) -> None:
        missing = min(self._wanted_sinks - self._sinks, key.shape[2])
        if missing > 0:
            self.sink_key = torch.cat([self.sink_key, key[:, :, :missing].to(self._dtype)], 2)
            self.sink_value = torch.cat([self.sink_value, value[:, :, :missing].to(self._dtype)], 2)
            self._sinks += missing
            self._columns += missing
            key, value = key[:, :, missing:], value[:, :, missing:]
        self._stream(key, value)

    def _stream(self, key: Tensor, value: Tensor) -> None:
        self._columns += key.shape[2]
        keys = torch.cat([self._key_rest, key.to(self._dtype)], 2)
        whole = keys.shape[2] // self._span * self._span
        if whole:
            blocks = keys[:, :, :whole].float().unflatten(2, (-1, self._group))
            codes, scale, zero = minmax(blocks, self._bits, 3)
            self._key_codes.add(pack(codes, self._bits, 3))
            self._key_scale.add(scale)
            self._key_zero.add(zero)
            self.flushes += whole // self._span
        self._key_rest = keys[:, :, whole:].clone() if whole else keys
        values = torch.cat([self._value_rest, value.to(self._dtype)], 2)
        old = max(0, values.shape[2] - self._span)
        if old:
            grouped = values[:, :, :old].float().unflatten(3, (-1, self._group))
            codes, scale, zero = minmax(grouped, self._bits, 4)
            self._value_codes.add(pack(codes.flatten(3), self._bits, 3))
            self._value_scale.add(scale)
            self._value_zero.add(zero)
        self._value_rest = values[:, :, old:].clone() if old else values

    def _read(self) -> tuple[Tensor, Tensor]:
        """Keys and values as attended to, float32 [B, H, columns, d]: workspace."""
        batch, heads, _, dim = self.sink_key.shape
        key = torch.empty(batch, heads, self._columns, dim, device=self.sink_key.device)
        value = torch.empty_like(key)
        at = self._sinks
        key[:, :, :at], value[:, :, :at] = self.sink_key, self.sink_value
        coded = self._key_codes.used * self._group
        if coded:
            blocks = key[:, :, at : at + coded].unflatten(2, (-1, self._group))
            unpack(self._key_codes.view, self._bits, 3, out=blocks)
            blocks.mul_(self._key_scale.view.unsqueeze(3)).add_(self._key_zero.view.unsqueeze(3))
        key[:, :, at + coded :] = self._key_rest
        coded = self._value_codes.used
        if coded:
            unpack(self._value_codes.view, self._bits, 3, out=value[:, :, at : at + coded])
            groups = value[:, :, at : at + coded].unflatten(3, (-1, self._group))
            groups.mul_(self._value_scale.view.unsqueeze(4)).add_(self._value_zero.view.unsqueeze(4))
        value[:, :, at + coded :] = self._value_rest
        return key, value

    def parts(self, query: Tensor, scale: float, softcap: float | None) -> list[tuple[Tensor, Tensor]]:
        key, value = self._read()
        bias = None
        if self._padded:
            columns = torch.arange(self._columns, device=key.device)
            bias = torch.where(columns[None, :] >= self._pads[:, None], 0.0, MASKED)[:, None, None, :]
        return [full_attend(query, key, value, scale, softcap, bias)]

    def tensors(self) -> dict[str, Tensor]:
        out = {
            "key_codes": self._key_codes.view,
            "key_scale": self._key_scale.view,
            "key_zero": self._key_zero.view,
            "value_codes": self._value_codes.view,
            "value_scale": self._value_scale.view,
            "value_zero": self._value_zero.view,
            "key_residual": self._key_rest,
            "value_residual": self._value_rest,
        }
        return out | ({"sink_key": self.sink_key, "sink_value": self.sink_value} if self._wanted_sinks else {})

    def residency(self, columns: int) -> Tensor:
        batch, heads = self.sink_key.shape[:2]
        out = torch.full((batch, heads, columns), int(Tier.FULL), dtype=torch.uint8, device=self.sink_key.device)
        coded = max(self._key_codes.used * self._group, self._value_codes.used)
        out[:, :, self._sinks : self._sinks + coded] = int(Tier.QUANT)
        return out

    def dense(self, row: int) -> list[tuple[Tensor, Tensor]]:
        key, value = self._read()
        pad = int(self._pads[row])
        return [(key[row, head, pad:], value[row, head, pad:]) for head in range(key.shape[1])]

    def select(self, rows: Tensor) -> None:
        for name in ("sink_key", "sink_value", "_key_rest", "_value_rest", "_pads"):
            setattr(self, name, getattr(self, name).index_select(0, rows))
        for name in ("_key_codes", "_key_scale", "_key_zero", "_value_codes", "_value_scale", "_value_zero"):
            getattr(self, name).select(rows)

    @property
    def counters(self) -> dict[str, int]:
        return {"key_flushes": self.flushes}


@dataclass(frozen=True, kw_only=True)
class Kivi(Rival):
    """Group-wise min-max codes.

    bits: 2 or 4. group_size: tokens per key group and channels per value group. residual: latest tokens in full, a
    multiple of group_size. sinks: first tokens in full; the article keeps none.
    """

    name = "kivi"
    label = "systems.kivi"
    family = "quantize"
    budgeted = False

    bits: int = 2
    group_size: int = 32
    residual: int = 128
    sinks: int = 0

    def __post_init__(self) -> None:
        require(self.bits in (2, 4), "bits must be 2 or 4", self.bits)
        require(
            self.group_size >= 8 and self.group_size % 4 == 0, "group_size must be a multiple of 4", self.group_size
        )
        holds = self.residual > 0 and self.residual % self.group_size == 0
        require(holds, "residual must be a positive multiple of group_size", self.residual)
        require(self.sinks >= 0, "sinks must be 0 or more", self.sinks)

    def check(self, shape: KVShape, head_dim: int) -> None:
        if head_dim % self.group_size:
            raise ConfigError(f"group_size must divide the head's {head_dim} channels, got {self.group_size}.")

    def account(self, shape: KVShape, prompt_tokens: int, generated: int, run: RunPlan) -> int:
        total = prompt_tokens + generated
        sinks = min(self.sinks, total)
        stream = total - sinks
        keys = stream // self.residual * self.residual
        values = max(0, stream - self.residual)
        dim, full = shape.head_dim, shape.head_dim * shape.element_bytes
        coded = (keys + values) * dim * self.bits // 8
        grids = keys // self.group_size * dim * 4 + values * (dim // self.group_size) * 4
        rest = (stream - keys) * full + (stream - values) * full + sinks * 2 * full
        return shape.num_layers * shape.num_kv_heads * (coded + grids + rest)

    def notices(self, shape: KVShape, prompt_tokens: int, run: RunPlan) -> list[str]:
        return [] if self.sinks else ["sinks_quantized"]

    def compress(self, staged: list[Staged], context: Context) -> list[Resident]:
        return [KiviLayer(self, part, context) for part in staged]
