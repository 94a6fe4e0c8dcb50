"""FullKV beside a comparison, as an oracle sees it: what it has attended to, will attend to, and remembers.

The reference may run some steps ahead of the systems; `pass_step` moves the systems' time on by one. Masses are
per query head and column, of batch row 0. Knows no oracle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.baselines.kept import RectKept
from engine.baselines.recorder import FutureMasses

ROOM = 256


class Witness:
    """FullKV's attention and storage on one teacher-forced sequence.

    Args:
        masses: told every step's probabilities when the systems reach it, not when FullKV does.
        ahead: steps that FullKV must have run beyond the systems.
    """

    def __init__(self, masses: FutureMasses | None, ahead: int) -> None:
        self.ahead = ahead
        self.columns = 0
        """Columns known at the systems' time."""
        self._masses = masses
        self._past = torch.zeros(0, 0, 0)
        self._steps: deque[list[Tensor]] = deque()
        self._kept: list[RectKept] = []

    def begin(self, sums: Sequence[Tensor], kept: Sequence[RectKept]) -> None:
        """The prompt's end: attention of every key, summed over all queries, [1, H_q, P] per layer, and storage."""
        self._past = torch.cat([part.float() for part in sums])
        self._kept = list(kept)
        self.columns = int(self._past.shape[2])

    def add(self, layer: int, probs: Tensor) -> None:
        """One step of FullKV in one layer: probabilities [H_q, columns]."""
        if layer == 0:
            self._steps.append([])
        self._steps[-1].append(probs)

    @torch.inference_mode()
    def pass_step(self) -> None:
        """The systems are about to take the oldest step that they have not taken."""
        step = self._steps.popleft()
        self.columns += 1
        if self.columns > self._past.shape[2]:
            self._past = torch.nn.functional.pad(self._past, (0, ROOM))
        for layer, probs in enumerate(step):
            self._past[layer, :, : probs.shape[-1]] += probs
            if self._masses is not None:
                self._masses.add(layer, probs)

    def past(self, layer: int) -> Tensor:
        """float32 [H_q, columns]: attention of all queries until now."""
        return self._past[layer, :, : self.columns]

    def future(self, layer: int, horizon: int) -> Tensor:
        """float32 [H_q, columns]: attention of the next `horizon` queries, or of those left, on what is known now."""
        total = torch.zeros_like(self.past(layer))
        for step in list(self._steps)[:horizon]:
            total += step[layer][:, : self.columns]
        return total

    def read(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """FullKV's own keys (after RoPE) and values of columns [first, last), [1, H_kv, n, d]."""
        key, value = self._kept[layer].tail.views()
        return key[:, :, first:last], value[:, :, first:last]
