"""A multi-token forward, attended in full precision and held until the event that ends it.

Workspace: reported as prefill peak. Every rival attends a prompt in full precision, so the first new
token is the same for all of them. Knows no system.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.attention.softmax import NO_KEYS, attend, merge
from engine.baselines.base import ALL_QUERIES, Needs, Staged
from engine.scores import prompt_column_masses


class StagedLayer:
    """Collects one layer's chunks.

    Args:
        needs: what to collect. start: column of the first staged token. pads: left padding of each row.
    """

    def __init__(self, needs: Needs, start: int, pads: list[int]) -> None:
        self._needs, self._start, self._pads = needs, start, pads
        self._staged: Staged | None = None

    @property
    def staged(self) -> Staged:
        """What has been collected.

        Raises:
            RuntimeError: nothing yet.
        """
        if self._staged is None:
            raise RuntimeError("nothing is staged")
        return self._staged

    @property
    def nbytes(self) -> int:
        return 0 if self._staged is None else self._staged.nbytes

    def ingest(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None,
        resident: list[tuple[Tensor, Tensor]],
        output_wanted: bool = True,
    ) -> Tensor:
        """Causal attention of [B, H_q, T, d] over staged and new tokens, merged with the `resident` parts.

        Without `output_wanted` the answer is the query, and no attention runs unless column sums need it.
        """
        past = 0 if self._staged is None else self._staged.key.shape[2]
        self._put(module, query, key, value)
        staged = self.staged
        if not output_wanted and staged.column_sums is None:
            return query
        out = torch.zeros_like(query)
        lse = torch.full(query.shape[:3], NO_KEYS, device=query.device)
        begin = self._start + past
        padded = any(pad > self._start for pad in self._pads)
        rows = [(slice(b, b + 1), pad) for b, pad in enumerate(self._pads)] if padded else [(slice(None), 0)]
        for row, pad in rows:
            skip = min(max(0, pad - begin), query.shape[2])
            if skip == query.shape[2]:
                continue
            hidden = max(0, pad - self._start)
            q = query[row, :, skip:]
            parts = [attend(q, key[row, :, skip:], value[row, :, skip:], scale=scale, causal=True, softcap=softcap)]
            if past > hidden:
                old = slice(hidden, past)
                parts.append(
                    attend(q, staged.key[row, :, old], staged.value[row, :, old], scale=scale, softcap=softcap)
                )
            part_out, part_lse = merge(parts)
            out[row, :, skip:], lse[row, :, skip:] = part_out.to(out.dtype), part_lse
        if resident:
            out, lse = merge([(out, lse), *resident])
        if staged.column_sums is not None:
            self._add_columns(staged, query, lse, begin, scale, softcap)
        return out.to(query.dtype)

    def _put(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> None:
        wanted = self._needs.queries
        old = self._staged
        if old is None:
            sums = None
            if self._needs.column_sums:
                sums = torch.zeros(query.shape[0], query.shape[1], key.shape[2], device=key.device)
            kept = (
                query if wanted == ALL_QUERIES else query[:, :, query.shape[2] - min(wanted, query.shape[2]) :].clone()
            )
            self._staged = Staged(key, value, kept, sums, module)
            return
        kept = torch.cat([old.query, query], 2)
        if wanted != ALL_QUERIES:
            kept = kept[:, :, kept.shape[2] - min(wanted, kept.shape[2]) :].clone()
        if old.column_sums is not None:
            old.column_sums = torch.nn.functional.pad(old.column_sums, (0, key.shape[2]))
        old.key, old.value, old.query = torch.cat([old.key, key], 2), torch.cat([old.value, value], 2), kept

    def _add_columns(
        self, staged: Staged, query: Tensor, lse: Tensor, begin: int, scale: float, softcap: float | None
    ) -> None:
        if staged.column_sums is None:
            return
        for row, pad in enumerate(self._pads):
            staged.column_sums[row] += prompt_column_masses(
                query[row : row + 1],
                staged.key[row : row + 1],
                lse[row : row + 1],
                scale=scale,
                softcap=softcap,
                query_start=begin,
                key_start=self._start,
                first_valid=pad,
                weights=None,
                power=1.0,
            )

    def select(self, rows: Tensor, pads: list[int]) -> None:
        """Keeps, repeats or reorders batch rows."""
        self._pads = pads
        staged = self._staged
        if staged is None:
            return
        staged.key, staged.value = staged.key.index_select(0, rows), staged.value.index_select(0, rows)
        staged.query = staged.query.index_select(0, rows)
        if staged.column_sums is not None:
            staged.column_sums = staged.column_sums.index_select(0, rows)
