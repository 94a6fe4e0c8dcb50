"""The paper's fast path: package flash-attn over the full-precision slots, with its log-sum-exp.

Live ledger entries go through `ledger.py` and are merged; windows are scored later, so that no
attention probabilities are materialised while decoding (the paper did, and lost 2.45x). Needs a CUDA
device, float16 or bfloat16, no left padding and no softcap. Not run on this project's own machines.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from engine.attention.sdpa import SdpaBackend
from engine.errors import BackendError

HINT = "pip install 'qevict-lab[flash]'"


class Flash2Backend(SdpaBackend):
    """FlashAttention-2 for arena and prompt, with deferred scoring."""

    name = "flash2"

    def __init__(self) -> None:
        from flash_attn import flash_attn_func  # an optional extra: imported where it is asked for

        self._flash: Any = flash_attn_func

    def attend_full(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Arena by flash-attn; a masked arena (padding, idle slots, sink offset) goes through torch."""
        if query.dtype not in (torch.float16, torch.bfloat16) or bool((bias < 0).any()):
            return super().attend_full(query, key, value, bias, scale, softcap)
        out, lse, _ = self._flash(
            query.transpose(1, 2),
            key.transpose(1, 2).to(query.dtype),
            value.transpose(1, 2).to(query.dtype),
            softmax_scale=scale,
            causal=False,
            softcap=softcap or 0.0,
            return_attn_probs=True,
        )
        return out.transpose(1, 2), lse


def unavailable(device: str) -> str | None:
    """Why flash2 cannot run on `device`, as a sentence; None where it can."""
    if not torch.cuda.is_available() or not device.startswith("cuda"):
        return "backend flash2 needs a CUDA device, and this run is on " + device + "; use sdpa or fused."
    if importlib.util.find_spec("flash_attn") is None:
        return f"backend flash2 needs the package flash-attn, which is not installed: {HINT}"
    return None


def make() -> Flash2Backend:
    """The backend.

    Raises:
        BackendError: the package is there but does not load.
    """
    try:
        return Flash2Backend()
    except ImportError as error:
        raise BackendError(f"package flash-attn is installed but does not load: {error}. Reinstall: {HINT}") from error
