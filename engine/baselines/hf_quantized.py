"""transformers' own QuantizedCache, where its extra package is installed.

Stock attention over stock layers: nothing of ours computes here. Bytes are what its tensors hold.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import QuantizedCache
from transformers.cache_utils import CacheLayerMixin

from engine.adapter import enable
from engine.baselines.base import Rival, RunPlan, require
from engine.budget import KVShape
from engine.errors import BackendError, CacheUseError, ConfigError
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


class HeldLayer(CacheLayerMixin):
    """A stock quantized layer whose prompt stays together until it ends.

    The stock layer codes what comes first, and codes its own codes anew with every further chunk: a prompt in chunks
    would be another system than a prompt in one. Stores in `dtype` and answers in the model's own.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, owner: HFCache, inner: Any, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner, self.inner, self._dtype = owner, inner, dtype
        self.seen = 0
        self.held: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores new tokens; what is to be attended to, as the stock layer has it."""
        self._owner.check_whole(self)
        tokens = key_states.shape[2]
        if tokens > 1 and (self.held is not None or not self.seen):
            old = self.held
            self.held = (
                key_states if old is None else torch.cat([old[0], key_states], 2),
                value_states if old is None else torch.cat([old[1], value_states], 2),
            )
            self.seen += tokens
            return self.held
        self.settle()
        self.seen += tokens
        key, value = self.inner.update(key_states.to(self._dtype), value_states.to(self._dtype))
        return key.to(key_states.dtype), value.to(value_states.dtype)

    def settle(self) -> None:
        """Ends a held prompt."""
        if self.held is not None:
            key, value = self.held
            self.held = None
            self.inner.update(key.to(self._dtype), value.to(self._dtype))

    def get_seq_length(self, *args: Any) -> int:
        return self.seen

    def get_mask_sizes(self, query: Any, *args: Any) -> tuple[int, int]:
        return self.seen + (query if isinstance(query, int) else int(query.shape[0])), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def crop(self, max_length: int) -> None:
        """Refuses to go back."""
        if max_length not in (0, self.seen):
            raise CacheUseError("this cache cannot be cropped: what was quantized can't come back exactly.")

    def reset(self) -> None:
        self.inner.reset()
        self.inner.is_initialized = False
        for name in ("_quantized_keys", "_quantized_values", "keys", "values"):
            setattr(self.inner, name, None)
        self.seen, self.held = 0, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.held is not None:
            self.held = self.held[0].index_select(0, beam_idx), self.held[1].index_select(0, beam_idx)
        elif self.seen:
            self.inner.reorder_cache(beam_idx)


class HFCache(QuantizedCache):
    """QuantizedCache with the questions that a comparison asks."""

    storage = "real"
    compress_seconds = 0.0
    prefill_peak_bytes = 0
    only_watching = False

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
        self._dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self._stored = run.stored(model.dtype)
        self._held = [HeldLayer(self, layer, self._stored) for layer in self.layers]
        self.layers = list(self._held)

    @property
    def managed_layers(self) -> list[int]:
        """All layers."""
        return list(range(len(self.layers)))

    @property
    def kv_shape(self) -> KVShape:
        """Shape that byte figures are computed from, in the stored dtype."""
        return KVShape(len(self.layers), self._heads, self._dim, self._stored.itemsize)

    def check_whole(self, layer: HeldLayer) -> None:
        """Refuses a forward after one that broke off between two layers."""
        if layer is self._held[0] and self._held[-1].seen != layer.seen:
            raise CacheUseError("an earlier forward with this cache did not finish: call reset() or build another one.")

    @torch.inference_mode()
    def settle(self) -> None:
        """Ends a held prompt now, as the next single-token forward would."""
        began = time.perf_counter()
        for layer in self._held:
            layer.settle()
        self.compress_seconds += time.perf_counter() - began

    def persistent_tensors(self) -> dict[str, Tensor]:
        """Tensors of all layers, those inside of the backend's own types too; empty while the prompt is held."""
        out: dict[str, Tensor] = {}
        for index, layer in enumerate(self._held):
            for name in ("_quantized_keys", "_quantized_values", "keys", "values"):
                for number, tensor in enumerate(_inner(getattr(layer.inner, name, None))):
                    out[f"{index}.{name}.{number}"] = tensor
        return out

    @property
    def persistent_bytes(self) -> int:
        """Summed `nbytes`."""
        return sum(tensor.nbytes for tensor in self.persistent_tensors().values())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the storages behind them."""
        storages = [tensor.untyped_storage() for tensor in self.persistent_tensors().values()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def residency(self) -> Tensor:
        """uint8 [layers, H_kv, columns]: all quantized but the residual."""
        columns = int(self.get_seq_length())
        out = torch.full((len(self.layers), self._heads, columns), int(Tier.QUANT), dtype=torch.uint8)
        for index, layer in enumerate(self._held):
            keys = getattr(layer.inner, "keys", None)
            rest = keys.shape[-2] if isinstance(keys, Tensor) and keys.dim() == 4 else 0
            out[index, :, 0 if layer.held is not None else columns - rest :] = int(Tier.FULL)
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
    """Groups of both keys and values along a token's channels, and a residual that is flushed whole.

    A flush codes everything anew, older codes too: their error grows with every one.
    """

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

    def check(self, shape: KVShape, head_dim: int) -> None:
        if (shape.num_kv_heads * head_dim) % self.group_size:
            raise ConfigError(
                f"group_size must divide the {shape.num_kv_heads * head_dim} channels of a token, "
                f"got {self.group_size}."
            )

    def account(self, shape: KVShape, prompt_tokens: int, generated: int, run: RunPlan) -> int:
        """Codes, scale and shift of every group in the stored dtype, and what came since the last flush.

        Groups are `group_size` values in a row of a head's tokens, so usually of one token; codes share bytes across
        groups. The same for both backends.
        """
        rest = generated % self.residual
        groups = (prompt_tokens + generated - rest) * shape.num_kv_heads * shape.head_dim // self.group_size
        codes = -(-groups * self.bits // 8) * self.group_size
        return shape.num_layers * (2 * (codes + groups * 2 * shape.element_bytes) + rest * shape.token_bytes)

    def notices(self, shape: KVShape, prompt_tokens: int, run: RunPlan) -> list[str]:
        return ["sinks_quantized"]

    def build(self, model: Any, run: RunPlan) -> Any:
        self.check_run(run)
        text = model.config.get_text_config(decoder=True)
        dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        self.check(KVShape(int(text.num_hidden_layers), heads, dim, 2), dim)
        reason = unavailable(self.backend)
        if reason is not None:
            raise BackendError(reason)
        return HFCache(model, self, run)
