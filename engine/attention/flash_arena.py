"""The full-precision slots of a decode step by a flash kernel: package flash-attn, or the one that torch brings.

Slots have no order, but what may be seen of them is one run of tokens: the first slot of a row holds its first block,
whose front is unused or padding, and the last slot holds the open block, whose tail is empty. So no mask is needed,
which such kernels do not take. Knows keys, values and runs; knows no tiers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.attention.softmax import attend
from engine.errors import BackendError

HINT = "pip install 'qevict-lab[flash]'"
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Runs:
    """Which tokens of each of R rows are seen: `begin` up to `end`.

    Attributes:
        begin: on the host, it never changes. end: int32 [R] on the device; end_known: the same on the host.
    """

    begin: list[int]
    end: Tensor
    end_known: list[int]


class FlashKernel(Protocol):
    """Attention of query [R, H_q, 1, d] over key, value [R, H_kv, K, d]: (out, natural log-sum-exp [R, H_q, 1])."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, softcap: float | None, runs: Runs
    ) -> tuple[Tensor, Tensor]: ...


class PackageKernel:
    """`flash_attn_with_kvcache`: split over keys, run ends read on the device.

    Raises:
        ImportError: the package is missing or does not load.
    """

    def __init__(self) -> None:
        from flash_attn import flash_attn_with_kvcache  # an optional extra: imported where it is asked for

        self._flash: Any = flash_attn_with_kvcache

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, softcap: float | None, runs: Runs
    ) -> tuple[Tensor, Tensor]:
        first, end = runs.begin[0], runs.end
        left = None
        if any(begin != first for begin in runs.begin):
            left = torch.tensor(runs.begin, dtype=torch.int32).to(query.device, non_blocking=True)
        elif first:
            key, value, end = key[:, :, first:], value[:, :, first:], end - first
        out, lse = self._flash(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            cache_seqlens=end,
            cache_leftpad=left,
            softmax_scale=scale,
            causal=False,
            softcap=softcap or 0.0,
            return_softmax_lse=True,
        )[:2]
        return out.transpose(1, 2), lse


def torch_kernel(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, softcap: float | None, runs: Runs
) -> tuple[Tensor, Tensor]:
    """torch's flash kernel, which takes no run ends: one call where all rows have the same run, else one per row.

    Raises:
        BackendError: a softcap, which that kernel does not know.
    """
    if softcap is not None and query.is_cuda:
        raise BackendError(f"backend flash2 needs the package flash-attn for a model that caps its logits: {HINT}")
    spans = list(zip(runs.begin, runs.end_known, strict=True))
    if spans.count(spans[0]) == len(spans):
        seen = slice(*spans[0])
        return attend(query, key[:, :, seen], value[:, :, seen], scale=scale, softcap=softcap)
    parts = [
        attend(
            query[r : r + 1],
            key[r : r + 1, :, slice(*span)],
            value[r : r + 1, :, slice(*span)],
            scale=scale,
            softcap=softcap,
        )
        for r, span in enumerate(spans)
    ]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def check_types(query: Tensor, stored: torch.dtype) -> None:
    """Refuses what no flash kernel multiplies.

    Raises:
        BackendError: queries or stored keys are not in half precision.
    """
    if query.is_cuda and (query.dtype not in HALF or stored not in HALF):
        raise BackendError(
            f"backend flash2 needs a model and a kv_dtype in float16 or bfloat16, got {query.dtype} and {stored}: "
            "use fused or sdpa."
        )
