"""Resident tokens of eviction rivals: rectangular where all heads keep as many, ragged where not.

Generated tokens follow in a rectangular tail. A ragged prompt part is one flat tensor with
`cu_seqlens`, so bytes fall by the same fraction as tokens; its attention is one product of all query
heads with the flat keys, other heads' tokens masked. Knows no scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.baselines.base import MASKED, Resident, Staged, full_attend
from engine.trace import Tier

GROW = 64


class Tail:
    """Tokens in order, [B, H_kv, room, d]; grows when it is full."""

    def __init__(self, key: Tensor, value: Tensor, room: int, dtype: torch.dtype) -> None:
        batch, heads, tokens, dim = key.shape
        self.key = torch.empty(batch, heads, tokens + room, dim, dtype=dtype, device=key.device)
        self.value = torch.empty_like(self.key)
        self.key[:, :, :tokens], self.value[:, :, :tokens] = key, value
        self.used = tokens

    def append(self, key: Tensor, value: Tensor) -> None:
        """Adds [B, H_kv, T, d]."""
        end = self.used + key.shape[2]
        if end > self.key.shape[2]:
            more = max(GROW, end - self.key.shape[2])
            size = (*self.key.shape[:2], more, self.key.shape[3])
            self.key = torch.cat([self.key, self.key.new_empty(size)], 2)
            self.value = torch.cat([self.value, self.value.new_empty(size)], 2)
        self.key[:, :, self.used : end], self.value[:, :, self.used : end] = key, value
        self.used = end

    def views(self) -> tuple[Tensor, Tensor]:
        """What is occupied."""
        return self.key[:, :, : self.used], self.value[:, :, : self.used]

    def select(self, rows: Tensor) -> None:
        self.key, self.value = self.key.index_select(0, rows), self.value.index_select(0, rows)


class RectKept(Resident):
    """Every head keeps as many prompt tokens; generated ones follow in the same buffer.

    Args:
        key, value: [B, H_kv, n, d]. columns: int64 [B, H_kv, n], ascending: workspace, for diagnostics.
        valid: bool [B, H_kv, n], False where a slot holds padding; None = all valid.
        lengths: whether a per-head length table belongs to the system's metadata.
    """

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        columns: Tensor,
        *,
        prompt: int,
        room: int,
        dtype: torch.dtype,
        valid: Tensor | None,
        lengths: bool,
    ) -> None:
        self.tail = Tail(key, value, room, dtype)
        self._columns, self._prompt, self._first = columns, prompt, key.shape[2]
        self._valid = valid
        heads = key.shape[0] * key.shape[1]
        offsets = torch.arange(0, (heads + 1) * self._first, max(1, self._first), device=key.device)[: heads + 1]
        self._cu = offsets.to(torch.int32) if lengths else None

    def append(self, key: Tensor, value: Tensor) -> None:
        self.tail.append(key, value)

    def bias(self) -> Tensor | None:
        """[B, H_kv, 1, used], or None where every slot counts."""
        if self._valid is None:
            return None
        later = self.tail.used - self._first
        seen = torch.nn.functional.pad(self._valid, (0, later), value=True)
        return torch.where(seen, 0.0, MASKED).unsqueeze(2)

    def parts(self, query: Tensor, scale: float, softcap: float | None) -> list[tuple[Tensor, Tensor]]:
        key, value = self.tail.views()
        return [full_attend(query, key, value, scale, softcap, self.bias())]

    def tensors(self) -> dict[str, Tensor]:
        key, value = self.tail.views()
        out = {"key": key, "value": value}
        if self._valid is not None:
            out["valid"] = self._valid
        if self._cu is not None:
            out["cu_seqlens"] = self._cu
        return out

    def residency(self, columns: int) -> Tensor:
        batch, heads = self._columns.shape[:2]
        out = torch.full((batch, heads, columns), int(Tier.EVICTED), dtype=torch.uint8, device=self._columns.device)
        seen = torch.full_like(self._columns, int(Tier.FULL), dtype=torch.uint8)
        if self._valid is not None:
            seen[~self._valid] = int(Tier.EVICTED)
        out.scatter_(2, self._columns, seen)
        out[:, :, self._prompt :] = int(Tier.FULL)
        return out

    def dense(self, row: int) -> list[tuple[Tensor, Tensor]]:
        key, value = self.tail.views()
        out = []
        for head in range(key.shape[1]):
            seen = torch.ones(key.shape[2], dtype=torch.bool, device=key.device)
            if self._valid is not None:
                seen[: self._first] = self._valid[row, head]
            out.append((key[row, head, seen].float(), value[row, head, seen].float()))
        return out

    def select(self, rows: Tensor) -> None:
        self.tail.select(rows)
        self._columns = self._columns.index_select(0, rows)
        if self._valid is not None:
            self._valid = self._valid.index_select(0, rows)
        if self._cu is not None:
            heads = self.tail.key.shape[0] * self.tail.key.shape[1]
            self._cu = (torch.arange(heads + 1, device=rows.device) * self._first).to(torch.int32)


class RaggedKept(Resident):
    """Every head keeps a number of prompt tokens of its own, flat with `cu_seqlens`; generated ones follow.

    Args:
        key, value: [B, H_kv, P, d] of the prompt. keep: bool [B, H_kv, P].
    """

    def __init__(self, key: Tensor, value: Tensor, keep: Tensor, *, room: int, dtype: torch.dtype) -> None:
        self.key, self.value = key[keep].to(dtype), value[keep].to(dtype)
        self._prompt, self._shape = key.shape[2], (key.shape[0], key.shape[1])
        self._columns = keep.nonzero()[:, 2]
        lengths = keep.sum(-1).flatten()
        self.cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        self.tail = Tail(key[:, :, :0], value[:, :, :0], room, dtype)

    @property
    def lengths(self) -> Tensor:
        """int64 [B, H_kv]: prompt tokens that each head keeps."""
        return self.cu_seqlens.long().diff().view(self._shape)

    def _owner(self) -> Tensor:
        """int64 [N]: which of the B·H_kv heads a flat token belongs to."""
        heads = torch.arange(self._shape[0] * self._shape[1], device=self.key.device)
        return heads.repeat_interleave(self.cu_seqlens.long().diff(), output_size=self.key.shape[0])

    def append(self, key: Tensor, value: Tensor) -> None:
        self.tail.append(key, value)

    def parts(self, query: Tensor, scale: float, softcap: float | None) -> list[tuple[Tensor, Tensor]]:
        batch, heads, tokens, dim = query.shape
        group = heads // self._shape[1]
        owner = self._owner()
        mine = torch.arange(batch * self._shape[1], device=owner.device).repeat_interleave(group * tokens)
        bias = torch.where(mine[:, None] == owner[None, :], 0.0, MASKED)
        flat = query.reshape(1, 1, -1, dim)
        out, lse = full_attend(flat, self.key[None, None], self.value[None, None], scale, softcap, bias[None, None])
        parts = [(out.view(batch, heads, tokens, dim), lse.view(batch, heads, tokens))]
        if self.tail.used:
            key, value = self.tail.views()
            parts.append(full_attend(query, key, value, scale, softcap))
        return parts

    def tensors(self) -> dict[str, Tensor]:
        key, value = self.tail.views()
        return {
            "key": self.key,
            "value": self.value,
            "cu_seqlens": self.cu_seqlens,
            "tail_key": key,
            "tail_value": value,
        }

    def residency(self, columns: int) -> Tensor:
        batch, heads = self._shape
        out = torch.full((batch * heads, columns), int(Tier.EVICTED), dtype=torch.uint8, device=self.key.device)
        out[self._owner(), self._columns] = int(Tier.FULL)
        out[:, self._prompt :] = int(Tier.FULL)
        return out.view(batch, heads, columns)

    def dense(self, row: int) -> list[tuple[Tensor, Tensor]]:
        key, value = self.tail.views()
        cu = self.cu_seqlens.tolist()
        out = []
        for head in range(self._shape[1]):
            at = row * self._shape[1] + head
            part = slice(cu[at], cu[at + 1])
            out.append(
                (
                    torch.cat([self.key[part], key[row, head]]).float(),
                    torch.cat([self.value[part], value[row, head]]).float(),
                )
            )
        return out

    def select(self, rows: Tensor) -> None:
        heads = self._shape[1]
        lengths = self.lengths.index_select(0, rows)
        cu = self.cu_seqlens.tolist()
        places = [torch.arange(cu[row * heads], cu[(row + 1) * heads], device=rows.device) for row in rows.tolist()]
        index = torch.cat(places)
        self.key, self.value, self._columns = self.key[index], self.value[index], self._columns[index]
        self._shape = (len(rows), heads)
        self.cu_seqlens = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0)).to(torch.int32)
        self.tail.select(rows)


def keep(
    staged: Staged, mask: Tensor, valid: Tensor, *, room: int, dtype: torch.dtype, per_head: bool = False
) -> RectKept | RaggedKept:
    """The resident form of a prompt of which `mask` stays.

    Args:
        mask: bool [B, H_kv, P]. valid: bool [B, P], no padding; padding may be in `mask` to fill a rectangle.
        room: generated tokens to come. per_head: the system's heads keep numbers of their own.
    """
    counts = mask.sum(-1)
    first = int(counts.flatten()[0])
    if bool((counts == first).all()):
        index = mask.nonzero()[:, 2].view(*mask.shape[:2], first)
        at = index.unsqueeze(-1).expand(-1, -1, -1, staged.key.shape[3])
        fine: Tensor | None = valid.unsqueeze(1).expand_as(mask).gather(2, index)
        if fine is not None and bool(fine.all()):
            fine = None
        whole = first == mask.shape[2]
        return RectKept(
            staged.key if whole else staged.key.gather(2, at),
            staged.value if whole else staged.value.gather(2, at),
            index,
            prompt=mask.shape[2],
            room=room,
            dtype=dtype,
            valid=fine,
            lengths=per_head,
        )
    return RaggedKept(staged.key, staged.value, mask & valid.unsqueeze(1), room=room, dtype=dtype)


def top_mask(scores: Tensor, count: int) -> Tensor:
    """bool like `scores`: the `count` largest along the last axis, lower index first among equals."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)
