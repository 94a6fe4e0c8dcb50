"""Attention backends behind one interface, and the choice between them.

eager    the readable reference; materialises probabilities
sdpa     torch's kernels, parts merged by log-sum-exp, windows scored later
flash2   a flash kernel for the full-precision part, the fused one for codes (CUDA)
fused    one compiled pass over arena and packed codes
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.attention import flash2, fused
from engine.attention.eager import EagerBackend
from engine.attention.sdpa import SdpaBackend
from engine.attention.state import KVState
from engine.errors import BackendError
from engine.scores import Ranker


class AttentionBackend(Protocol):
    """What the cache asks of a backend.

    `scores_in_step` says that decode adds window masses itself; else it returns a log-sum-exp and the
    cache scores the last queries at the event: `scores_codes` says that it need not do so for codes.
    `workspace_bytes` is what steps write and read again.
    """

    name: str
    scores_in_step: bool

    @property
    def scores_codes(self) -> bool: ...

    @property
    def workspace_bytes(self) -> int: ...

    def decode(
        self,
        state: KVState,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor | None]: ...

    def ingest(
        self,
        state: KVState,
        layer: int,
        query: Tensor,
        *,
        start: int,
        scale: float,
        softcap: float | None,
        weights: Tensor | None,
    ) -> Tensor: ...


def unavailable(name: str, device: str, head_dim: int | None = None, value_group_size: int | None = None) -> str | None:
    """Why backend `name` cannot run on `device`, as one sentence; None where it can."""
    if name in ("eager", "sdpa"):
        return None
    if name == "flash2":
        return flash2.unavailable(device, head_dim)
    if name == "fused":
        return fused.unavailable(device, head_dim, value_group_size)
    return f"unknown backend {name!r}."


def make_backend(name: str, device: str, ranker: Ranker, head_dim: int) -> AttentionBackend:
    """The backend called `name`; "auto" takes fused where it runs, else sdpa.

    Raises:
        BackendError: it cannot run here; the text says what is missing.
    """
    group = ranker.config.value_group_size
    if name == "auto":
        name = "sdpa" if unavailable("fused", device, head_dim, group) else "fused"
    reason = unavailable(name, device, head_dim, group)
    if reason is not None:
        raise BackendError(reason)
    if name == "eager":
        return EagerBackend()
    if name == "sdpa":
        return SdpaBackend()
    if name == "flash2":
        return flash2.make(ranker)
    return fused.make(device, ranker)
