"""The FullKV reference of a comparison, and what its attention says about the others' residency.

FullKV keeps everything in the model's dtype and hands each step's probabilities to `FutureMasses`, which
sums them over blocks of steps: for every event and system the mass on what was evicted or quantized at
that event, over the next H queries (paper §3.5). Masses are per query head and column, so token- and
head-granular systems are measured exactly. Batch row 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.baselines.base import Context, Needs, Resident, Staged
from engine.baselines.fullkv import FullKV
from engine.baselines.kept import RectKept
from engine.trace import Tier

if TYPE_CHECKING:
    from engine.baselines.witness import Witness


@dataclass(slots=True)
class _Event:
    """An event whose future has not ended: what each system could not reach or had quantized at it."""

    columns: int
    kinds: list[Tensor]
    """per system float32 [L, H_kv, columns, 2]: evicted, quantized."""
    sums: list[Tensor]
    """per system float64 [L, H_q, 2], on the CPU."""
    whole: Tensor
    """float64 [L, H_q]."""
    steps: int = 0


@dataclass(frozen=True, slots=True)
class FutureMass:
    """Shares of FullKV's next attention at one event, means over layers and heads.

    fmm: on evicted positions. fp_only: on evicted and quantized ones. steps: queries summed.
    """

    columns: int
    fmm: float
    fp_only: float
    steps: int


class FutureMasses:
    """Accumulates probabilities by block of steps and closes events after H queries.

    Args:
        layers, heads, kv_heads: of the model's managed layers. horizon: H, in steps; whole blocks of `block`.
        systems: how many residencies every event brings.
    """

    def __init__(
        self, layers: int, heads: int, kv_heads: int, *, systems: int, horizon: int, block: int, device: torch.device
    ) -> None:
        self._heads, self._kv = heads, kv_heads
        self._blocks = max(1, horizon // block)
        self._device, self._size = device, (layers, heads)
        self._mass = torch.zeros(layers, heads, 0, device=device)
        self._steps = 0
        self._open: list[_Event] = []
        self.closed: list[list[FutureMass]] = [[] for _ in range(systems)]
        self._age: list[int] = []

    def add(self, layer: int, probs: Tensor) -> None:
        """One step of one layer: probabilities [H_q, columns]."""
        columns = probs.shape[-1]
        if columns > self._mass.shape[2]:
            self._mass = torch.nn.functional.pad(self._mass, (0, columns - self._mass.shape[2] + 256))
        self._mass[layer, :, :columns] += probs
        self._steps += layer == 0

    def boundary(self, residencies: list[Tensor]) -> None:
        """Ends a block of steps and opens an event with the systems' residency now, uint8 [L, H_kv, columns]."""
        self._flush()
        columns = residencies[0].shape[2]
        kinds = []
        for table in residencies:
            there = table.to(self._device)
            kinds.append(torch.stack([there == Tier.EVICTED, there == Tier.QUANT], -1).float())
        sums = [torch.zeros(*self._size, 2, dtype=torch.float64) for _ in residencies]
        whole = torch.zeros(self._size, dtype=torch.float64)
        self._open.append(_Event(columns, kinds, sums, whole))
        self._age.append(0)

    def _flush(self) -> None:
        if self._steps:
            for event in self._open:
                mass = self._mass[:, :, : event.columns]
                event.whole += mass.sum(-1).cpu()
                grouped = mass.unflatten(1, (self._kv, -1))
                for kinds, total in zip(event.kinds, event.sums, strict=True):
                    total += (grouped @ kinds).flatten(1, 2).cpu()
                event.steps += self._steps
            self._age = [age + 1 for age in self._age]
        self._mass.zero_()
        self._steps = 0
        while self._age and self._age[0] >= self._blocks:
            self._close()

    def _close(self) -> None:
        event = self._open.pop(0)
        self._age.pop(0)
        if not event.steps:
            return
        for found, total in zip(self.closed, event.sums, strict=True):
            share = (total / event.whole.unsqueeze(-1).clamp_min(1e-30)).mean((0, 1)).tolist()
            found.append(FutureMass(event.columns, share[0], share[0] + share[1], event.steps))

    @torch.inference_mode()
    def finish(self) -> None:
        """Ends the run: events with a shorter future use what there is."""
        self._flush()
        while self._open:
            self._close()


class Recorded(Resident):
    """FullKV of one layer whose decode steps hand out their probabilities."""

    def __init__(self, inner: RectKept, layer: int, told: Callable[[int, Tensor], None]) -> None:
        self.inner, self._layer, self._told = inner, layer, told

    def append(self, key: Tensor, value: Tensor) -> None:
        self.inner.append(key, value)

    def parts(self, query: Tensor, scale: float, softcap: float | None) -> list[tuple[Tensor, Tensor]]:
        return self.inner.parts(query, scale, softcap)

    def step(self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None) -> Tensor:
        self.inner.append(key, value)
        out, lse = self.inner.parts(query, scale, softcap)[0]
        keys = self.inner.tail.views()[0]
        kv, heads = keys.shape[1], query.shape[1]
        logits = query[0].reshape(kv, heads // kv, -1).float() @ keys[0].float().transpose(-1, -2) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        self._told(self._layer, (logits.flatten(0, 1) - lse[0]).exp())
        return out.to(query.dtype)

    def tensors(self) -> dict[str, Tensor]:
        return self.inner.tensors()

    def residency(self, columns: int) -> Tensor:
        return self.inner.residency(columns)

    def dense(self, row: int) -> list[tuple[Tensor, Tensor]]:
        return self.inner.dense(row)

    def select(self, rows: Tensor) -> None:
        self.inner.select(rows)


@dataclass(frozen=True, kw_only=True)
class Reference(FullKV):
    """FullKV that records.

    masses: told every step. witness: told instead, and passes steps on when the systems reach them.
    """

    masses: FutureMasses | None = None
    witness: Witness | None = None

    def needs(self) -> Needs:
        return Needs(column_sums=self.witness is not None)

    def compress(self, staged: list[Staged], context: Context) -> list[Resident]:
        plain = FullKV.compress(self, staged, context)
        told = self.witness or self.masses
        if told is None:
            return plain
        kept = [resident for resident in plain if isinstance(resident, RectKept)]
        if self.witness is not None:
            self.witness.begin([part.column_sums for part in staged if part.column_sums is not None], kept)
        return [Recorded(resident, layer, told.add) for layer, resident in enumerate(kept)]
