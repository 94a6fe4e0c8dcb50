"""transformers' own QuantizedCache, where its extra package is installed.

Stock attention over stock layers: nothing of ours computes here. Bytes are what its tensors hold.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import QuantizedCache

from engine.adapter import enable
from engine.baselines.base import Rival, RunPlan, require
from engine.budget import KVShape
from engine.errors import BackendError
from engine.trace import Tier

BACKENDS = {"quanto": "optimum.quanto", "hqq": "hqq"}
INSTALL = {"quanto": "pip install optimum-quanto", "hqq": "pip install hqq"}


def unavailable(backend: str) -> str | None:
    """Why QuantizedCache cannot use `backend` here, as a sentence; None where it can."""
    package = BACKENDS[backend]
    try:
        found = importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        found = False
    if found:
        return None
    return f"transformers' QuantizedCache needs the package {package}, which is not installed: {INSTALL[backend]}."


class HFCache(QuantizedCache):
    """QuantizedCache with the questions that a comparison asks."""

    storage = "real"
    compress_seconds = 0.0
    prefill_peak_bytes = 0

    def __init__(self, model: Any, settings: HFQuantized, run: RunPlan) -> None:
        config = model.config.get_text_config(decoder=True)
        super().__init__(
            settings.backend,
            config,
            nbits=settings.bits,
            q_group_size=settings.group_size,
            residual_length=settings.residual,
        )
        enable(model)
        self.device = next(model.parameters()).device
        self._heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)

    @property
    def managed_layers(self) -> list[int]:
        """All layers."""
        return list(range(len(self.layers)))

    def settle(self) -> None:
        """Nothing is staged."""

    def persistent_tensors(self) -> dict[str, Tensor]:
        """Tensors of all layers, those inside of the backend's own types too."""
        out: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            for name in ("_quantized_keys", "_quantized_values", "keys", "values"):
                for number, tensor in enumerate(_inner(getattr(layer, name, None))):
                    out[f"{index}.{name}.{number}"] = tensor
        return out

    @property
    def persistent_bytes(self) -> int:
        """Summed `nbytes`."""
        return sum(tensor.nbytes for tensor in self.persistent_tensors().values())

    allocated_bytes = persistent_bytes

    def residency(self) -> Tensor:
        """uint8 [layers, H_kv, columns]: all quantized but the residual."""
        columns = int(self.get_seq_length())
        out = torch.full((len(self.layers), self._heads, columns), int(Tier.QUANT), dtype=torch.uint8)
        for index, layer in enumerate(self.layers):
            keys = getattr(layer, "keys", None)
            rest = keys.shape[-2] if isinstance(keys, Tensor) and keys.dim() == 4 else 0
            out[index, :, columns - rest :] = int(Tier.FULL)
        return out


def _inner(value: Any) -> list[Tensor]:
    """Plain tensors inside of a quantized tensor, a tuple or a dict."""
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in _inner(part)]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in _inner(part)]
    if not isinstance(value, Tensor):
        return []
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is None or type(value) is Tensor:
        return [value]
    names, _ = flatten()
    return [tensor for name in names for tensor in _inner(getattr(value, name))]


@dataclass(frozen=True, kw_only=True)
class HFQuantized(Rival):
    """Per-channel groups of both keys and values, and a residual that is flushed whole."""

    name = "hf-quantized"
    label = "systems.hf_quantized"
    family = "quantize"
    budgeted = False

    bits: int = 4
    group_size: int = 64
    residual: int = 128
    backend: str = "quanto"

    def __post_init__(self) -> None:
        require(self.backend in BACKENDS, f"backend must be one of {', '.join(BACKENDS)}", self.backend)
        require(self.bits in (2, 4), "bits must be 2 or 4", self.bits)

    def account(self, shape: KVShape, prompt_tokens: int, generated: int, run: RunPlan) -> int:
        """Nominal: codes and two 16-bit numbers per group; the residual varies from 0 to `residual` tokens."""
        rest = (generated % self.residual) if generated else 0
        coded = (prompt_tokens + generated - rest) * 2 * shape.num_kv_heads * shape.head_dim
        return shape.num_layers * (coded * self.bits // 8 + coded // self.group_size * 4 + rest * shape.token_bytes)

    def notices(self, shape: KVShape, prompt_tokens: int, run: RunPlan) -> list[str]:
        return ["sinks_quantized", "bytes_nominal"]

    def build(self, model: Any, run: RunPlan) -> Any:
        reason = unavailable(self.backend)
        if reason is not None:
            raise BackendError(reason)
        return HFCache(model, self, run)
