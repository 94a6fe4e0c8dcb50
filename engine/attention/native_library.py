"""The compiled CPU kernels as a library: finding and loading it, choice of instruction set, threads.

Knows the library's calls and structures (see `kernels/qevict.h`); knows nothing of pools, tiers or models.
Where the library is absent, `available()` is False and `reason()` says why in a sentence.
"""

from __future__ import annotations

import ctypes
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from engine.errors import BackendError

LANES = 16
ISA_VARIABLE = "QEVICT_ISA"
ISAS = ("portable", "avx2", "avx512")
_ABI = 5
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_INT = ctypes.c_int
_PTR = ctypes.c_void_p
_FLOAT = ctypes.c_float


class NativePlan(ctypes.Structure):
    """`qe_plan` of `kernels/qevict.h`, field for field."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in (
            "batch", "q_heads", "kv_heads", "head_dim", "rows_per_batch", "window", "bits", "value_groups",
            "rotary_dim", "grid_offset", "max_positions", "arena_dtype", "arena_slots", "ledger_blocks")),
        *((name, _FLOAT) for name in ("scale", "softcap", "rope_scale", "unused")),
        *((name, _PTR) for name in (
            "arena_k", "arena_v", "arena_ids", "arena_count", "first_column", "k_codes", "v_codes",
            "k_scale", "k_zero", "v_scale", "v_zero", "ledger_ids", "live_count", "cos", "sin")),
    ]  # fmt: skip


class NativeColumns(ctypes.Structure):
    """`qe_columns` of `kernels/qevict.h`, field for field."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in (
            "heads", "kv_heads", "head_dim", "queries", "keys", "dtype", "first_column", "pad",
            "window", "grid_offset", "blocks", "groups")),
        *((name, _FLOAT) for name in ("scale", "softcap", "power")),
        ("unused", ctypes.c_int32),
        ("query", _PTR), ("key", _PTR),
        *((name, ctypes.c_int64) for name in (
            "query_head_stride", "query_row_stride", "key_head_stride", "key_row_stride")),
        *((name, _PTR) for name in ("lse", "weights", "mass", "value", "out", "lse_out")),
        *((name, ctypes.c_int64) for name in (
            "value_head_stride", "value_row_stride", "out_head_stride", "out_row_stride")),
    ]  # fmt: skip


def _open() -> tuple[ctypes.CDLL | None, str | None]:
    """The library and None, or None and the reason why there is none."""
    here = Path(__file__).parent
    found = [here / f"_kernels{suffix}" for suffix in EXTENSION_SUFFIXES]
    path = next((candidate for candidate in found if candidate.exists()), None)
    if path is None:
        return None, (
            "the compiled CPU kernels are not built (no C compiler was found when the package was installed); "
            "install gcc or clang and reinstall the package"
        )
    try:
        library = ctypes.CDLL(str(path))
        library.qevict_abi.restype = _INT
        abi = int(library.qevict_abi())
    except (OSError, AttributeError) as error:
        return None, f"the compiled CPU kernels at {path.name} cannot be loaded: {error}"
    if abi != _ABI * 10_000 + ctypes.sizeof(NativePlan) + ctypes.sizeof(NativeColumns):
        return None, f"the compiled CPU kernels at {path.name} belong to another version; reinstall the package"
    library.qevict_use.argtypes = [ctypes.c_char_p]
    library.qevict_isa.restype = ctypes.c_char_p
    library.qevict_set_threads.argtypes = [_INT]
    library.qevict_set_team.argtypes = [_PTR]
    library.qevict_decode.argtypes = [
        _PTR, _PTR, _INT, _PTR, _PTR, _INT, _PTR, _INT, _INT, _INT, _PTR, _PTR, _PTR, _PTR,
    ]  # fmt: skip
    library.qevict_read.argtypes = [_PTR]
    library.qevict_read.restype = ctypes.c_uint64
    library.qevict_full.argtypes = [
        _PTR, _INT, _PTR, _PTR, _INT, _INT, _INT, _INT, _INT, _INT, _FLOAT, _FLOAT, _PTR, _PTR,
    ]  # fmt: skip
    library.qevict_columns.argtypes = [ctypes.POINTER(NativeColumns)]
    library.qevict_prefill.argtypes = [ctypes.POINTER(NativeColumns)]
    wanted = os.environ.get(ISA_VARIABLE, "").strip().lower()
    if library.qevict_use(wanted.encode()):
        return None, f"{ISA_VARIABLE}={wanted} asks for kernels that this build or processor lacks; known: {ISAS}"
    return library, None


_library, _reason = _open()


def _torch_team() -> int:
    """Address of the entry point of the OpenMP runtime that torch itself has loaded; 0 where there is none."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")):
        try:
            entry = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(entry, _PTR).value or 0
    return 0


def share_torch_threads(share: bool) -> bool:
    """Whether calls run on torch's own OpenMP threads from now on, or on a small pool of ours.

    Torch's threads are awake after its own operations, and two pools would fight for the same cores; ours never
    waits for a thread that is slow to wake. Returns what is in force: False where torch brings no such runtime.
    """
    entry = _torch_team() if share else 0
    loaded().qevict_set_team(entry or None)
    return bool(entry)


def available() -> bool:
    """Whether the compiled kernels can run here."""
    return _library is not None


def reason() -> str | None:
    """Why the kernels cannot run here; None where they can."""
    return _reason


def loaded() -> ctypes.CDLL:
    """The library.

    Raises:
        BackendError: it cannot run here; the text says why.
    """
    if _library is None:
        raise BackendError(f"backend 'fused' cannot run on this CPU: {_reason}")
    return _library


def isa() -> str:
    """Name of the instruction set in use: portable (SSE2 or NEON), avx2 or avx512.

    Raises:
        BackendError: the kernels are not available.
    """
    return bytes(loaded().qevict_isa()).decode()


def supported_isas() -> tuple[str, ...]:
    """Every instruction set that this build and processor can run; leaves the one in use unchanged."""
    if _library is None:
        return ()
    current = isa()
    able = tuple(name for name in ISAS if not _library.qevict_use(name.encode()))
    _library.qevict_use(current.encode())
    return able


def use_isa(name: str) -> None:
    """Takes the named instruction set from the next call on; "" takes the best one.

    Raises:
        BackendError: this build or processor lacks it.
    """
    if loaded().qevict_use(name.encode()):
        raise BackendError(f"instruction set {name!r} cannot run here; this machine has {supported_isas()}")


def set_threads(count: int) -> None:
    """Threads that a call may use from now on (the caller is one of them); small calls use one all the same."""
    loaded().qevict_set_threads(int(count))


def threads() -> int:
    """Threads that a call may use."""
    return int(loaded().qevict_threads())


def dtype_code(tensor: torch.Tensor, name: str) -> int:
    """The library's number for the tensor's dtype; a BackendError where it has none."""
    number = _DTYPES.get(tensor.dtype)
    if number is None:
        raise BackendError(f"{name} has dtype {tensor.dtype}; the CPU kernels take float32, float16 and bfloat16")
    return number


def address(tensor: torch.Tensor, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> int:
    """Address of a tensor of the given shape and one of the dtypes, contiguous, on the CPU."""
    if tuple(tensor.shape) != shape:
        raise BackendError(f"{name} has shape {tuple(tensor.shape)}; the CPU kernel expects {shape}")
    if dtypes and tensor.dtype not in dtypes:
        raise BackendError(f"{name} has dtype {tensor.dtype}; the CPU kernel expects {dtypes[0]}")
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise BackendError(f"{name} must be contiguous and on the CPU")
    return tensor.data_ptr()
