"""KVQuant: everything stays; non-uniform codes for keys before RoPE and for values, outliers apart.

Dense codes are packed; outliers lie in a sparse store by token (float16 value, int16 channel, int32 row
pointers). The first token stays in full. A token is coded once, when it comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.baselines.base import MASKED, Context, Resident, Rival, RunPlan, Staged, full_attend, require
from engine.baselines.kivi import Grown
from engine.baselines.nuq import Codebook, codebooks, nearest, normalised, split_counts, value_outliers
from engine.baselines.packing import pack, unpack, without_padding
from engine.budget import KVShape
from engine.errors import ConfigError
from engine.rope import RopeTable
from engine.trace import Tier


class Outliers:
    """Sparse entries, rows in order of arrival: values float16, channels int16, row pointers int32."""

    def __init__(self, device: torch.device, room: int) -> None:
        self._values = Grown(torch.empty(0, dtype=torch.float16, device=device), 0, room)
        self._channels = Grown(torch.empty(0, dtype=torch.int16, device=device), 0, room)
        self._rows = Grown(torch.zeros(1, dtype=torch.int32, device=device), 0, 1)

    def add(self, values: Tensor, mask: Tensor) -> None:
        """Appends rows: values and mask [rows, width]."""
        at = mask.nonzero()
        self._values.add(values[mask].clamp(-65504.0, 65504.0).to(torch.float16))
        self._channels.add(at[:, 1].to(torch.int16))
        self._rows.add((self._rows.view[-1] + mask.sum(1).cumsum(0)).to(torch.int32))

    def put(self, dense: Tensor) -> None:
        """Writes all entries into [rows, width]."""
        pointers = self._rows.view.long()
        count = self._values.used
        row = torch.arange(dense.shape[0], device=dense.device).repeat_interleave(pointers.diff(), output_size=count)
        dense[row, self._channels.view.long()] = self._values.view.to(dense.dtype)

    @property
    def count(self) -> int:
        """Entries."""
        return self._values.used

    def tensors(self, name: str) -> dict[str, Tensor]:
        return {
            f"{name}_outliers": self._values.view,
            f"{name}_channels": self._channels.view,
            f"{name}_rows": self._rows.view,
        }

    def select(self, rows: Tensor, batch: int) -> None:
        """Keeps batch rows; entry rows run token by token, batch rows inside."""
        pointers = self._rows.view.long()
        tokens = (len(pointers) - 1) // batch
        chosen = (torch.arange(tokens, device=rows.device)[:, None] * batch + rows[None, :]).flatten()
        counts = pointers.diff()[chosen]
        offset = torch.arange(int(counts.sum()), device=rows.device)
        begin = torch.nn.functional.pad(counts.cumsum(0), (1, 0))[:-1]
        index = offset + (pointers[:-1][chosen] - begin).repeat_interleave(counts)
        values, channels = self._values.view[index], self._channels.view[index]
        table = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        self._values, self._channels, self._rows = Grown(values, 0, 0), Grown(channels, 0, 0), Grown(table, 0, 0)


class NuqLayer(Resident):
    """Codes [B, T, H·d·b/8] of keys and values; value range per token; codebook and thresholds of the layer."""

    def __init__(self, kvquant: KVQuant, part: Staged, context: Context, book: Codebook, rope: RopeTable) -> None:
        self._settings, self._rope, self._dtype = kvquant, rope, context.dtype
        self._bits, self._share = kvquant.bits, kvquant.outliers
        device = part.key.device
        self._pads = torch.tensor(context.pads, device=device)
        self._shift = context.shift.to(device)
        self._padded = any(context.pads)
        batch, self._heads, _, dim = part.key.shape
        width = self._heads * dim
        low, high = book.key_low.float(), book.key_high.float()
        self.centre, self.half = ((high + low) / 2).half(), ((high - low) / 2).half()
        self.key_lut, self.value_lut = book.key_lut.clone(), book.value_lut.clone()
        room = context.columns + context.run.planned_new_tokens
        codes = torch.empty(batch, 0, width * self._bits // 8, dtype=torch.uint8, device=device)
        self._keys, self._values = Grown(codes, 1, room), Grown(codes, 1, room)
        grid = torch.empty(batch, 0, dtype=torch.float16, device=device)
        self._low, self._high = Grown(grid, 1, room), Grown(grid, 1, room)
        most = sum(split_counts(width, self._share)) * room * batch
        self._key_out, self._value_out = Outliers(device, most), Outliers(device, most)
        blank = part.key.new_empty(batch, self._heads, 0, dim, dtype=self._dtype)
        self.first_key, self.first_value = blank, blank.clone()
        self._columns = 0
        self._pad_list = context.pads
        self.append(without_padding(part.key, context.pads), without_padding(part.value, context.pads))

    def append(self, key: Tensor, value: Tensor) -> None:
        missing = min(self._settings.sinks - self.first_key.shape[2], key.shape[2])
        if missing > 0:
            self.first_key = torch.cat([self.first_key, key[:, :, :missing].to(self._dtype)], 2)
            self.first_value = torch.cat([self.first_value, value[:, :, :missing].to(self._dtype)], 2)
            self._columns += missing
            key, value = key[:, :, missing:], value[:, :, missing:]
        tokens = key.shape[2]
        if not tokens:
            return
        positions = self._positions(self._columns, self._columns + tokens)
        self._columns += tokens
        flat = self._rope.undo(key.float(), positions[:, None]).transpose(1, 2).flatten(2)
        centre, half = self.centre.float(), self.half.float()
        low, high = centre - half, centre + half
        mask = ((flat < low) | (flat > high)) if self._share else torch.zeros_like(flat, dtype=torch.bool)
        codes = nearest(normalised(flat, low, high), self.key_lut)
        self._keys.add(pack(codes, self._bits, 2))
        self._key_out.add(*_by_token(flat, mask))
        flat = value.float().transpose(1, 2).flatten(2)
        mask, low, high = value_outliers(flat, self._share)
        low, high = low.half(), high.half()
        codes = nearest(normalised(flat, low.float()[..., None], high.float()[..., None]), self.value_lut)
        self._values.add(pack(codes, self._bits, 2))
        self._low.add(low)
        self._high.add(high)
        self._value_out.add(*_by_token(flat, mask))

    def _positions(self, begin: int, end: int) -> Tensor:
        """int64 [B, T]."""
        columns = torch.arange(begin, end, device=self._shift.device)
        positions = (columns[None, :] - self._shift[:, None]).clamp_min(0)
        self._rope.ensure(end + 1)
        return positions

    def _read(self) -> tuple[Tensor, Tensor]:
        """Keys after RoPE and values, float32 [B, H, columns, d]: workspace."""
        key = _looked_up(self.key_lut, unpack(self._keys.view, self._bits, 2, torch.int64))
        key.mul_(self.half.float()).add_(self.centre.float())
        self._put(self._key_out, key)
        key = key.unflatten(2, (self._heads, -1)).transpose(1, 2)
        first = self.first_key.shape[2]
        key = self._rope.apply(key, self._positions(first, self._columns)[:, None])
        value = _looked_up(self.value_lut, unpack(self._values.view, self._bits, 2, torch.int64))
        low, high = self._low.view.float()[..., None], self._high.view.float()[..., None]
        value.mul_((high - low) / 2).add_((high + low) / 2)
        self._put(self._value_out, value)
        value = value.unflatten(2, (self._heads, -1)).transpose(1, 2)
        return torch.cat([self.first_key.float(), key], 2), torch.cat([self.first_value.float(), value], 2)

    @staticmethod
    def _put(outliers: Outliers, dense: Tensor) -> None:
        if outliers.count:
            by_token = dense.transpose(0, 1).reshape(-1, dense.shape[2])
            outliers.put(by_token)
            if by_token.data_ptr() != dense.data_ptr():  # one batch row: a view, written in place
                dense.copy_(by_token.view(dense.shape[1], dense.shape[0], -1).transpose(0, 1))

    def parts(self, query: Tensor, scale: float, softcap: float | None) -> list[tuple[Tensor, Tensor]]:
        key, value = self._read()
        bias = None
        if self._padded:
            columns = torch.arange(self._columns, device=key.device)
            bias = torch.where(columns[None, :] >= self._pads[:, None], 0.0, MASKED)[:, None, None, :]
        return [full_attend(query, key, value, scale, softcap, bias)]

    def tensors(self) -> dict[str, Tensor]:
        return {
            "first_key": self.first_key,
            "first_value": self.first_value,
            "key_codes": self._keys.view,
            "value_codes": self._values.view,
            "value_low": self._low.view,
            "value_high": self._high.view,
            "key_centre": self.centre,
            "key_half": self.half,
            "key_lut": self.key_lut,
            "value_lut": self.value_lut,
            **self._key_out.tensors("key"),
            **self._value_out.tensors("value"),
        }

    def residency(self, columns: int) -> Tensor:
        batch = self.first_key.shape[0]
        out = torch.full((batch, self._heads, columns), int(Tier.FULL), dtype=torch.uint8, device=self._pads.device)
        out[:, :, self.first_key.shape[2] : self._columns] = int(Tier.QUANT)
        return out

    def dense(self, row: int) -> list[tuple[Tensor, Tensor]]:
        key, value = self._read()
        pad = int(self._pads[row])
        return [(key[row, head, pad:], value[row, head, pad:]) for head in range(self._heads)]

    def select(self, rows: Tensor) -> None:
        batch = self.first_key.shape[0]
        for name in ("first_key", "first_value", "_pads", "_shift"):
            setattr(self, name, getattr(self, name).index_select(0, rows))
        for grown in (self._keys, self._values, self._low, self._high):
            grown.select(rows)
        self._key_out.select(rows, batch)
        self._value_out.select(rows, batch)

    @property
    def counters(self) -> dict[str, int]:
        return {"key_outliers": self._key_out.count, "value_outliers": self._value_out.count}


def _looked_up(lut: Tensor, codes: Tensor) -> Tensor:
    """Centroids of codes [B, T, width], float32: a gather is several times faster than indexing."""
    rows = codes.flatten(0, 1)
    return lut.float().expand(rows.shape[0], -1).gather(1, rows).view(codes.shape)


def _by_token(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """[B, T, width] as rows, token by token."""
    width = values.shape[2]
    return values.transpose(0, 1).reshape(-1, width), mask.transpose(0, 1).reshape(-1, width)


@dataclass(frozen=True, kw_only=True)
class KVQuant(Rival):
    """Dense-and-sparse codes (nuq).

    bits: 2, 3, 4 or 5. outliers: share kept apart. sinks: first tokens in full. fisher: weigh calibration by squared
    gradients (one backward pass). qnorm: match mean and spread of the codes. calibration_tokens: of the bundled text.
    """

    name = "kvquant"
    label = "systems.kvquant"
    family = "quantize"
    budgeted = False

    bits: int = 3
    outliers: float = 0.01
    sinks: int = 1
    fisher: bool = False
    qnorm: bool = False
    calibration_tokens: int = 512

    def __post_init__(self) -> None:
        require(self.bits in (2, 3, 4, 5), "bits must be 2, 3, 4 or 5", self.bits)
        require(0.0 <= self.outliers < 0.5, "outliers must be in [0, 0.5)", self.outliers)
        require(self.sinks >= 0, "sinks must be 0 or more", self.sinks)
        require(self.calibration_tokens >= 16, "calibration_tokens must be 16 or more", self.calibration_tokens)

    def check(self, shape: KVShape, head_dim: int) -> None:
        if shape.num_kv_heads * head_dim % 8:
            raise ConfigError(f"kvquant packs 8 channels at once: H_kv·d must be a multiple of 8, got {head_dim}.")

    def fixed_bytes(self, shape: KVShape, tokens: int, key_outliers: int, value_outliers: int) -> int:
        """One layer with so many coded tokens and outliers."""
        width = shape.num_kv_heads * shape.head_dim
        codes = 2 * tokens * width * self.bits // 8
        sparse = (key_outliers + value_outliers) * 4 + 2 * 4 * (tokens + 1)
        return int(codes + sparse + 4 * tokens + 4 * width + 2 * (1 << self.bits) * 2)

    def account(self, shape: KVShape, prompt_tokens: int, generated: int, run: RunPlan) -> int:
        """Nominal: how many keys lie beyond their thresholds depends on the text."""
        total = prompt_tokens + generated
        sinks = min(self.sinks, total)
        width = shape.num_kv_heads * shape.head_dim
        each = sum(split_counts(width, self.outliers)) * (total - sinks)
        layer = self.fixed_bytes(shape, total - sinks, round(self.outliers * width * (total - sinks)), each)
        return shape.num_layers * (layer + sinks * shape.token_bytes)

    def notices(self, shape: KVShape, prompt_tokens: int, run: RunPlan) -> list[str]:
        return ["bytes_nominal"] + ([] if self.sinks else ["sinks_quantized"])

    def _books(self, model: Any, tokenizer: Any) -> list[Codebook]:
        return codebooks(
            model,
            tokenizer,
            bits=self.bits,
            share=self.outliers,
            tokens=self.calibration_tokens,
            fisher=self.fisher,
            qnorm=self.qnorm,
        )

    def build(self, model: Any, run: RunPlan) -> Any:
        self._books(model, run.tokenizer)  # calibrates now, not in the middle of a run
        return Rival.build(self, model, run)

    def compress(self, staged: list[Staged], context: Context) -> list[Resident]:
        books, rope = self._books(context.model, context.run.tokenizer), context.rope()
        return [NuqLayer(self, part, context, book, rope) for part, book in zip(staged, books, strict=True)]
