"""Shapes on which the GPU kernels are compared with the float32 twin, and the pools that both begin with.

Every pair of values (query heads per KV head, head_dim, window, bits, dtype) occurs in some case: their product has
400 members, and each costs four compilations. Knows no timings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.state import KVState
from engine.benchmarks.attention import HeadShape, filled_state
from engine.config import QEvictConfig

GROUPS = (1, 3, 4, 7, 8)
HEAD_DIMS = (64, 80, 96, 128, 256)
WINDOWS = (4, 8, 16, 32)
BITS = (2, 4)
DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Case:
    """A shape whose decode step is compared."""

    group: int
    head_dim: int
    dtype: str
    bits: int = 2
    window: int = 8
    value_group: int | None = None
    softcap: float | None = None
    scope: str = "layer"
    batch: int = 2

    @property
    def context(self) -> int:
        """Columns; enough for some dozen windows in each tier."""
        return 700 if self.window < 16 else 1500


def covering() -> list[Case]:
    """25 cases in which every pair of values of two of the five settings occurs."""
    return [
        Case(group, dim, DTYPES[(i + j // 2) % 2], BITS[(i // 2 + j) % 2], WINDOWS[(i + j) % 4])
        for i, group in enumerate(GROUPS)
        for j, dim in enumerate(HEAD_DIMS)
    ]


SPECIAL = (
    Case(3, 64, "float32"),
    Case(4, 128, "float32", bits=4),
    Case(8, 256, "bfloat16", softcap=30.0),
    Case(4, 128, "bfloat16", value_group=32),
    Case(4, 128, "float16", scope="kv_head", window=16),
)
"""float32, a capped logit, groups of values, one decision per KV head."""

QUICK = (
    Case(3, 64, "float16"),
    Case(4, 128, "bfloat16"),
    Case(1, 80, "bfloat16", bits=4, window=4),
    Case(7, 96, "float16", window=16),
    Case(8, 256, "bfloat16", bits=4, window=32),
)
"""Every value once."""


def filled(case: Case, device: torch.device) -> tuple[KVState, KVState]:
    """The same random pools on the device and on the CPU."""
    config = QEvictConfig(
        kv_budget=0.4,
        window_size=case.window,
        bits=case.bits,
        value_group_size=case.value_group,
        score_scope=case.scope,
        kv_dtype=case.dtype,
    )
    shape = HeadShape("check", 2 * case.group, 2, case.head_dim)
    dtype = getattr(torch, case.dtype)
    torch.manual_seed(case.head_dim + case.group)
    twin = filled_state(shape, config, case.context, case.batch, 1, dtype)
    torch.manual_seed(case.head_dim + case.group)
    mine = filled_state(shape, config, case.context, case.batch, 1, dtype)
    for name, tensor in twin.pool.persistent_tensors().items():
        getattr(mine.pool, name).copy_(tensor)
    return moved(mine, device), twin


def new_token(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of one decode step, on the CPU."""
    dtype = getattr(torch, case.dtype)
    query = torch.randn(case.batch, 2 * case.group, 1, case.head_dim).to(dtype)
    key, value = (torch.randn(case.batch, 2, 1, case.head_dim).to(dtype) for _ in range(2))
    return query, key, value


def moved(state: KVState, device: torch.device) -> KVState:
    """A filled state with all its tensors on `device`."""
    store = state.pool
    for owner in (state, store, state.rope):
        names = getattr(type(owner), "__slots__", None) or list(vars(owner))
        for name in names:
            value = getattr(owner, name)
            if isinstance(value, Tensor):
                setattr(owner, name, value.to(device))
    state.device = store.device = device
    return state


def on(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors on `device`."""
    return tuple(tensor.to(device) for tensor in tensors)


def distance(mine: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm of `theirs`; infinite where something is not a number."""
    mine, theirs = mine.double().cpu(), theirs.double().cpu()
    found = float((mine - theirs).norm() / theirs.norm().clamp_min(1e-12))
    return found if found == found else float("inf")
