"""Rotary position embedding, as the model itself does it, and its inverse.

The Quant tier stores keys before RoPE. They are un-rotated in float32 with the model's own
frequencies at the true positions, and rotated back when they are read. Tables hold cos and sin of
unit norm; `scale` is the model's attention scaling (yarn, longrope), divided out on the way in and
multiplied on the way out. Tables are append-only: a row that was used once never changes.
Knows the rotary module of a transformers model; knows no cache.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import UnsupportedModelError

KNOWN_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of the first 2·r channels.

    Args:
        x: [..., d], float32.
        cos: [..., r], broadcastable over x's leading axes; sin likewise. Pass -sin to rotate back.

    Returns:
        Rotated copy of x; channels beyond 2·r pass through.
    """
    r = cos.shape[-1]
    low, high = x[..., :r], x[..., r : 2 * r]
    parts = [low * cos - high * sin, high * cos + low * sin]
    if x.shape[-1] > 2 * r:
        parts.append(x[..., 2 * r :])
    return torch.cat(parts, dim=-1)


class RopeTable:
    """cos and sin of unit norm for positions 0 … n-1 of one kind of layer.

    Attributes:
        cos, sin: float32 [n, r]; r is half the number of rotated channels.
        scale: the model's attention scaling, applied to the rotated channels.
    """

    def __init__(self, rotary: nn.Module, layer_type: str | None, device: torch.device) -> None:
        self._rotary = rotary
        self._prefix = f"{layer_type}_" if layer_type and hasattr(rotary, f"{layer_type}_inv_freq") else ""
        self._device = device
        self.kind = self._rope_kind(layer_type)
        if self.kind not in KNOWN_TYPES:
            raise UnsupportedModelError(
                f"RoPE type must be one of {', '.join(KNOWN_TYPES)}, got {self.kind!r}: this model's keys cannot be "
                "un-rotated, so QEvict refuses it."
            )
        self.scale = float(getattr(rotary, f"{self._prefix}attention_scaling", 1.0))
        self._used = self._frequencies()
        empty = torch.empty(0, self._used.shape[0], device=device)
        self.cos, self.sin = empty, empty.clone()

    def _rope_kind(self, layer_type: str | None) -> str:
        kind = getattr(self._rotary, "rope_type", "default")
        if isinstance(kind, dict):
            kind = kind.get(layer_type, "default")
        return str(kind)

    def _frequencies(self) -> Tensor:
        buffer = getattr(self._rotary, f"{self._prefix}inv_freq", None)
        if not isinstance(buffer, Tensor):
            raise UnsupportedModelError("the model's rotary module must hold inv_freq; this layout is unknown.")
        return buffer.detach().to(self._device, torch.float32).clone()

    @property
    def half(self) -> int:
        """r: half the number of rotated channels."""
        return self._used.shape[0]

    def ensure(self, length: int) -> None:
        """Extends the tables to `length` positions.

        Raises:
            UnsupportedModelError: longrope crossed into its other regime after keys were stored.
        """
        have = self.cos.shape[0]
        if length <= have and self.kind != "longrope":
            return
        now = self._frequencies()
        if self.kind == "longrope" and have and not torch.equal(now, self._used):
            raise UnsupportedModelError(
                "a longrope model must not cross its original length while a cache is in use: the frequencies of "
                "stored keys would change. Start with the longer prompt, or stay below it."
            )
        if length <= have:
            return
        self._used = now
        target = max(length, 2 * have, 256)
        positions = torch.arange(have, target, device=self._device, dtype=torch.float32)
        angles = positions[:, None] * now[None, :]
        self.cos = torch.cat([self.cos, angles.cos()])
        self.sin = torch.cat([self.sin, angles.sin()])

    def restart(self) -> None:
        """Forgets the tables, for a new sequence."""
        self.cos, self.sin = self.cos[:0], self.sin[:0]

    def apply(self, key: Tensor, positions: Tensor) -> Tensor:
        """Rotates pre-RoPE keys [..., d] (float32) at `positions` [...]."""
        at = positions.long()
        out = rotate(key, self.cos[at], self.sin[at])
        return self._scaled(out, self.scale)

    def undo(self, key: Tensor, positions: Tensor) -> Tensor:
        """Pre-RoPE keys from post-RoPE ones [..., d] at `positions` [...], float32."""
        at = positions.long()
        out = rotate(key.float(), self.cos[at], -self.sin[at])
        return self._scaled(out, 1.0 / self.scale)

    def _scaled(self, key: Tensor, factor: float) -> Tensor:
        if factor == 1.0:
            return key
        key[..., : 2 * self.half] *= factor
        return key


def find_rotary(model: nn.Module) -> nn.Module:
    """The rotary module that the decoder's layers share.

    Raises:
        UnsupportedModelError: there is none.
    """
    for module in model.modules():
        rotary = getattr(module, "rotary_emb", None)
        if isinstance(rotary, nn.Module):
            return rotary
    raise UnsupportedModelError("the model must use rotary position embedding with one shared rotary_emb module.")


def probe_layout(attention: nn.Module, table: RopeTable, head_dim: int) -> None:
    """Checks on random vectors that the model file rotates half against half, as `rotate` does.

    Raises:
        UnsupportedModelError: the layout is another one (interleaved pairs, several axes).
    """
    source: Any = sys.modules.get(type(attention).__module__)
    apply = getattr(source, "apply_rotary_pos_emb", None)
    if apply is None:
        raise UnsupportedModelError(f"{type(attention).__name__} has no apply_rotary_pos_emb: unknown RoPE layout.")
    table.ensure(8)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 4, head_dim, generator=generator)
    cos = torch.cat([table.cos[2:6].cpu()] * 2, dim=-1)[None]
    sin = torch.cat([table.sin[2:6].cpu()] * 2, dim=-1)[None]
    mine = rotate(x, table.cos[2:6].cpu(), table.sin[2:6].cpu())
    try:
        theirs = apply(x, x, cos, sin)[0]
    except (RuntimeError, TypeError, ValueError) as error:
        try:
            part = 2 * table.half
            theirs = torch.cat([apply(x[..., :part], x[..., :part], cos, sin)[0], x[..., part:]], dim=-1)
        except (RuntimeError, TypeError, ValueError):
            raise UnsupportedModelError(f"unknown RoPE layout in {source.__name__}: {error}.") from error
    if theirs.shape != mine.shape or not torch.allclose(mine, theirs, atol=1e-5):
        raise UnsupportedModelError(
            f"RoPE of {source.__name__} must rotate the first half of a head against the second; it does not."
        )
