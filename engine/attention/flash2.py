"""Backend flash2: whether it can run, and which flash kernel it takes. The backend is in `flash2_cuda.py`.

The full-precision slots go to package flash-attn where it is installed, else to the flash kernel that torch brings;
the codes go to the fused Triton kernel. Needs a CUDA device and half precision.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from engine.attention import fused
from engine.attention.flash_arena import HINT, FlashKernel, PackageKernel, torch_kernel
from engine.errors import BackendError
from engine.scores import Ranker

if TYPE_CHECKING:
    from engine.attention.flash2_cuda import Flash2Backend


def unavailable(device: str, head_dim: int | None = None) -> str | None:
    """Why flash2 cannot run on `device`, as a sentence; None where it can."""
    if not torch.cuda.is_available() or not device.startswith("cuda"):
        return "backend flash2 needs a CUDA device, and this run is on " + device + "; use sdpa or fused."
    reason = fused.unavailable(device, head_dim)
    if reason is not None:
        return f"backend flash2 cannot run without the kernel for codes of backend fused: {reason}"
    if head_dim is not None and head_dim % 8:
        return f"backend flash2 needs a head_dim that is a multiple of 8, got {head_dim}; use sdpa or fused."
    if importlib.util.find_spec("flash_attn") is None and not torch.backends.cuda.is_flash_attention_available():
        return f"backend flash2 needs a flash kernel: this torch has none, and package flash-attn is missing: {HINT}"
    return None


def kernel() -> FlashKernel:
    """Package flash-attn's kernel, or torch's where the package is not installed.

    Raises:
        BackendError: the package is there but does not load.
    """
    if importlib.util.find_spec("flash_attn") is None:
        return torch_kernel
    try:
        return PackageKernel()
    except ImportError as error:
        raise BackendError(f"package flash-attn is installed but does not load: {error}. Reinstall: {HINT}") from error


def make(ranker: Ranker) -> Flash2Backend:
    """The backend.

    Raises:
        BackendError: no flash kernel loads, or the settings store float32.
    """
    if ranker.config.kv_dtype == "float32":
        raise BackendError("backend flash2 needs a kv_dtype of float16 or bfloat16, got float32: use fused or sdpa.")
    from engine.attention.flash2_cuda import Flash2Backend  # needs triton

    return Flash2Backend(ranker, kernel())
