"""ZipCache: salient tokens in 4 bits, the others in 2; saliency is attention normalised by who could see.

Keys per channel and set; values token-wise after their channels are balanced. Tokens are coded in
blocks: the prompt, then every `gap` generated tokens, which wait in full until then.
Paper silent: what a later block does to older codes. Ours has grids of its own; old codes are final.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.softmax import merge
from engine.baselines.base import (
    ALL_QUERIES,
    MASKED,
    Context,
    Needs,
    Resident,
    Rival,
    RunPlan,
    Staged,
    full_attend,
    require,
)
from engine.baselines.kept import Tail, top_mask
from engine.baselines.packing import minmax, pack, unpack, without_padding
from engine.budget import KVShape
from engine.trace import Tier

MODES = ("paper", "repo")


def saliency(rows: Tensor, row_columns: Tensor, mode: str) -> Tensor:
    """Normalised attention of every column.

    Args:
        rows: probabilities of the probes [B, H, g, R, P]. row_columns: int64 [R], column of each probe.
        mode: "paper" divides by the number of probes that could see the column, "repo" by the number of all
            queries that could.

    Returns:
        float32 [B, H, P], summed over probes and group.
    """
    total = rows.sum((2, 3))
    columns = torch.arange(rows.shape[-1], device=rows.device)
    if mode == "paper":
        seen = (row_columns[:, None] >= columns[None, :]).sum(0).clamp_min(1)
    else:
        seen = rows.shape[-1] - columns
    return total / seen


def channel_scale(value: Tensor) -> Tensor:
    """sqrt(max over tokens of |x|) of every channel, [B, H, T, d] → float16 [B, H, d]; at least a tiny number."""
    return value.float().abs().amax(2).sqrt().clamp(2.0**-14, 65504.0).to(torch.float16)


class CodedSet:
    """Tokens of one precision: the r-th token of every head shares a value grid. Codes run along channels.

    key_codes, value_codes [B, H, n, d·b/8]; key_scale, key_zero [B, H, d]; value_scale, value_zero [B, n].
    """

    def __init__(self, key: Tensor, balanced: Tensor, bits: int) -> None:
        self.bits = bits
        if key.shape[2] == 0:
            key = key.new_zeros(*key.shape[:2], 0, key.shape[3])
            grid = key.new_zeros(*key.shape[:2], key.shape[3], dtype=torch.float16)
            codes, self.key_scale, self.key_zero = key.to(torch.uint8), grid, grid.clone()
        else:
            codes, self.key_scale, self.key_zero = minmax(key.float(), bits, 2)
        self.key_codes = pack(codes, bits, 3)
        flat = balanced.transpose(1, 2).flatten(2)
        codes, self.value_scale, self.value_zero = minmax(flat, bits, 2)
        self.value_codes = pack(codes.unflatten(2, (key.shape[1], -1)).transpose(1, 2).contiguous(), bits, 3)

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and still balanced values, float32 [B, H, n, d]."""
        key = unpack(self.key_codes, self.bits, 3)
        key.mul_(self.key_scale.unsqueeze(2)).add_(self.key_zero.unsqueeze(2))
        value = unpack(self.value_codes, self.bits, 3)
        value.mul_(self.value_scale[:, None, :, None]).add_(self.value_zero[:, None, :, None])
        return key, value

    NAMES = ("key_codes", "key_scale", "key_zero", "value_codes", "value_scale", "value_zero")

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.NAMES}

    def select(self, rows: Tensor) -> None:
        for name in self.NAMES:
            setattr(self, name, getattr(self, name).index_select(0, rows))


class Block:
    """A run of columns coded at once: salient and regular sets, a channel scale, and a bitmap of who is who."""

    def __init__(self, zip_cache: ZipCache, key: Tensor, value: Tensor, scores: Tensor, dtype: torch.dtype) -> None:
        batch, heads, self.tokens, dim = key.shape
        key, value = key.to(dtype), value.to(dtype)
        regular = int(zip_cache.ratio * self.tokens)
        salient = top_mask(scores, self.tokens - regular)
        self.scale = channel_scale(value)
        balanced = value.float() / self.scale.float().unsqueeze(2)

        def chosen(mask: Tensor, source: Tensor) -> Tensor:
            index = mask.nonzero()[:, 2].view(batch, heads, -1, 1).expand(-1, -1, -1, dim)
            return source.gather(2, index)

        self.sets = [
            CodedSet(chosen(mask, key), chosen(mask, balanced), bits)
            for mask, bits in ((salient, zip_cache.high_bits), (~salient, zip_cache.low_bits))
        ]
        spare = -self.tokens % 8
        self.bitmap = pack(torch.nn.functional.pad(salient.to(torch.uint8), (0, spare)), 1, 2)

    def salient(self) -> Tensor:
        """bool [B, H, tokens]."""
        return unpack(self.bitmap, 1, 2, torch.uint8)[..., : self.tokens].bool()

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values in the sets' order, salient first, float32 [B, H, tokens, d]."""
        parts = [coded.read() for coded in self.sets]
        key = torch.cat([part[0] for part in parts], 2)
        value = torch.cat([part[1] for part in parts], 2)
        return key, value.mul_(self.scale.unsqueeze(2))

    def order(self) -> Tensor:
        """int64 [B, H, tokens]: column inside the block of every place in the sets' order."""
        mask = self.salient()
        return (~mask).to(torch.uint8).sort(dim=-1, stable=True).indices

    def tensors(self) -> dict[str, Tensor]:
        out = {"bitmap": self.bitmap, "channel_scale": self.scale}
        for name, coded in zip(("salient", "regular"), self.sets, strict=True):
            out |= {f"{name}_{key}": tensor for key, tensor in coded.tensors().items()}
        return out

    def select(self, rows: Tensor) -> None:
        self.bitmap, self.scale = self.bitmap.index_select(0, rows), self.scale.index_select(0, rows)
        for coded in self.sets:
            coded.select(rows)


class ZipLayer(Resident):
    """Blocks of codes and a buffer of the newest tokens in full."""

    def __init__(self, zip_cache: ZipCache, part: Staged, context: Context, layer: int) -> None:
        self._zip, self._dtype = zip_cache, context.dtype
        self._pads = torch.tensor(context.pads, device=part.key.device)
        self._padded = any(context.pads)
        scores = zip_cache.prompt_saliency(part, context, context.valid(), layer)
        key, value = without_padding(part.key, context.pads), without_padding(part.value, context.pads)
        self.blocks = [Block(zip_cache, key, value, scores, self._dtype)]
        self._buffer(part)

    def _buffer(self, part: Staged) -> None:
        self.rest = Tail(part.key[:, :, :0], part.value[:, :, :0], self._zip.gap, self._dtype)

    def append(self, key: Tensor, value: Tensor) -> None:
        self.rest.append(key, value)

    def step(self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None) -> Tensor:
        self.append(key, value)
        out, lse = merge(self.parts(query, scale, softcap))
        if self.rest.used >= self._zip.gap:
            keys, values = self.rest.views()
            batch, kv = keys.shape[:2]
            grouped = query.reshape(batch, kv, -1, query.shape[3]).float()
            logits = grouped @ keys.float().transpose(-1, -2) * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            row = (logits - lse.reshape(batch, kv, -1, 1)).exp().unsqueeze(3)
            last = torch.tensor([keys.shape[2] - 1], device=keys.device)
            self.blocks.append(Block(self._zip, keys, values, saliency(row, last, self._zip.mode), self._dtype))
            self.rest.used = 0
        return out.to(query.dtype)

    def absorb(self, staged: Staged, context: Context) -> None:
        """A later turn joins the buffer; if that fills it, turn and buffer become one block."""
        self.append(staged.key, staged.value)
        if self.rest.used >= self._zip.gap:
            keys, values = self.rest.views()
            whole = Staged(keys, values, staged.query, None, staged.module)
            valid = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool, device=keys.device)
            scores = self._zip.prompt_saliency(whole, context, valid, len(self.blocks))
            self.blocks.append(Block(self._zip, keys, values, scores, self._dtype))
            self._buffer(staged)

    def _read(self) -> tuple[Tensor, Tensor]:
        parts = [block.read() for block in self.blocks]
        key, value = self.rest.views()
        keys, values = [part[0] for part in parts], [part[1] for part in parts]
        return torch.cat([*keys, key.float()], 2), torch.cat([*values, value.float()], 2)

    def _seen(self) -> Tensor:
        """bool [B, H, n] in the order of `_read`: no padding."""
        orders, start = [], 0
        for block in self.blocks:
            orders.append(block.order() + start)
            start += block.tokens
        columns = torch.cat(orders, 2)
        return torch.nn.functional.pad(columns >= self._pads[:, None, None], (0, self.rest.used), value=True)

    def parts(self, query: Tensor, scale: float, softcap: float | None) -> list[tuple[Tensor, Tensor]]:
        key, value = self._read()
        bias = torch.where(self._seen(), 0.0, MASKED).unsqueeze(2) if self._padded else None
        return [full_attend(query, key, value, scale, softcap, bias)]

    def tensors(self) -> dict[str, Tensor]:
        key, value = self.rest.views()
        out = {"key": key, "value": value}
        for number, block in enumerate(self.blocks):
            out |= {f"{number}_{name}": tensor for name, tensor in block.tensors().items()}
        return out

    def residency(self, columns: int) -> Tensor:
        batch, heads = self.rest.key.shape[:2]
        out = torch.full((batch, heads, columns), int(Tier.FULL), dtype=torch.uint8, device=self._pads.device)
        out[:, :, : sum(block.tokens for block in self.blocks)] = int(Tier.QUANT)
        return out

    def dense(self, row: int) -> list[tuple[Tensor, Tensor]]:
        key, value = self._read()
        seen = self._seen()[row]
        return [(key[row, head, seen[head]], value[row, head, seen[head]]) for head in range(key.shape[1])]

    def select(self, rows: Tensor) -> None:
        self.rest.select(rows)
        self._pads = self._pads.index_select(0, rows)
        for block in self.blocks:
            block.select(rows)

    @property
    def counters(self) -> dict[str, int]:
        return {"blocks": len(self.blocks)}


@dataclass(frozen=True, kw_only=True)
class ZipCache(Rival):
    """Mixed precision by saliency.

    mode: how saliency is normalised. ratio: share of tokens of each KV head in `low_bits`. gap: generated tokens
    between two compressions. probes: share of prompt queries that probe, once from the end and once at random.
    """

    name = "zipcache"
    label = "systems.zipcache"
    family = "quantize"
    budgeted = False

    mode: str = "paper"
    ratio: float = 0.4
    high_bits: int = 4
    low_bits: int = 2
    gap: int = 100
    probes: float = 0.05

    def __post_init__(self) -> None:
        require(self.mode in MODES, f"mode must be one of {', '.join(MODES)}", self.mode)
        require(0.0 <= self.ratio <= 1.0, "ratio must be in [0, 1]", self.ratio)
        require(self.high_bits in (2, 4) and self.low_bits in (2, 4), "bits must be 2 or 4", self.low_bits)
        require(self.gap >= 1, "gap must be 1 or more", self.gap)
        require(0.0 < self.probes <= 1.0, "probes must be in (0, 1]", self.probes)

    def needs(self) -> Needs:
        return Needs(queries=ALL_QUERIES)

    def prompt_saliency(self, part: Staged, context: Context, valid: Tensor, layer: int) -> Tensor:
        """float32 [B, H, P]; padding at -1."""
        queries, keys = part.query.shape[2], part.key.shape[2]
        count = max(1, int(self.probes * queries))
        drawn = torch.randint(queries, (count,), generator=context.generator(layer))
        index = torch.cat([torch.arange(queries - count, queries), drawn]).to(part.key.device)
        columns = index + keys - queries
        key = part.key.float()
        batch, kv, _, dim = key.shape
        grouped = part.query[:, :, index].reshape(batch, kv, -1, len(index), dim).float()
        logits = grouped @ key.unsqueeze(2).transpose(-1, -2) * context.scale
        if context.softcap is not None:
            logits = context.softcap * torch.tanh(logits / context.softcap)
        seen = torch.arange(keys, device=key.device)[None, :] <= columns[:, None]
        both = seen[None] & valid[:, None, :] & valid[:, columns, None]
        rows = logits.masked_fill(~both[:, None, None], -torch.inf).softmax(-1).nan_to_num(0.0)
        return saliency(rows, columns, self.mode).masked_fill(~valid[:, None], -1.0)

    def block_bytes(self, shape: KVShape, tokens: int) -> int:
        """One block of one layer: codes, key grids, value grids, channel scale, bitmap."""
        heads, width = shape.num_kv_heads, shape.num_kv_heads * shape.head_dim
        regular = int(self.ratio * tokens)
        codes = 2 * width * ((tokens - regular) * self.high_bits + regular * self.low_bits) // 8
        return codes + 2 * 4 * width + 4 * tokens + 2 * width + heads * -(-tokens // 8)

    def account(self, shape: KVShape, prompt_tokens: int, generated: int, run: RunPlan) -> int:
        blocks, rest = divmod(generated, self.gap)
        layer = self.block_bytes(shape, prompt_tokens) + blocks * self.block_bytes(shape, self.gap)
        return shape.num_layers * (layer + rest * shape.token_bytes)

    def notices(self, shape: KVShape, prompt_tokens: int, run: RunPlan) -> list[str]:
        return ["sinks_quantized"]

    def compress(self, staged: list[Staged], context: Context) -> list[Resident]:
        return [ZipLayer(self, part, context, layer) for layer, part in enumerate(staged)]
