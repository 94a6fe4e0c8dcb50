"""RivalCache: one transformers Cache for every rival; the rival decides what stays.

    cache = SnapKV().build(model, RunPlan(BudgetSpec(share=0.2)))
    model.generate(**inputs, past_key_values=cache)

Prompts are staged in full precision and compressed when the first single token comes (or at
`settle()`). Lengths and positions are logical: they count evicted tokens too. Knows how transformers
talks to a cache; knows no particular system.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from engine.adapter import enable
from engine.baselines.base import Context, Resident, Rival, RunPlan
from engine.baselines.staging import StagedLayer
from engine.budget import KVShape
from engine.cache_layer import QEvictLayer, attention_module, build_layers
from engine.errors import CacheUseError, UnsupportedModelError
from engine.padding import check_padding, left_pads, position_shift
from engine.rope import RopeTable, find_rotary, probe_layout
from engine.trace import Tier


class RivalLayer(QEvictLayer):
    """A managed layer of a rival: the same tags and counters, and it tells its module."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scale: float,
        softcap: float | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        """Called by the adapter right after `update`."""
        self.pending = False
        owner: Any = self.owner
        out: Tensor = owner.attend_module(module, self.index, query, key, value, mask, scale, softcap, position_ids)
        return out

    def crop(self, max_length: int) -> None:
        """Refuses to go back: what was dropped or quantized can't return."""
        if max_length not in (0, self.seen):
            raise CacheUseError(
                "this cache cannot be cropped: what was evicted or quantized can't come back. "
                "Assisted decoding and prompt lookup need another cache."
            )


class RivalCache(Cache):
    """A rival as a cache.

    Args:
        model: the model that will run; it is switched to our attention function (other caches keep working).
        rival: the system and its parameters.
        run: budget, planned length, stored dtype, seed.

    Raises:
        UnsupportedModelError: no full-attention layer, or shared KV.
        ConfigError: the rival's parameters do not fit the model.
    """

    def __init__(self, model: PreTrainedModel, rival: Rival, run: RunPlan | None = None) -> None:
        self.rival, self.run = rival, run or RunPlan()
        text = model.config.get_text_config(decoder=True)
        owner: Any = self
        found, self._managed = build_layers(owner, text)
        layers = [RivalLayer(owner, layer.index) if isinstance(layer, QEvictLayer) else layer for layer in found]
        super().__init__(layers=layers)
        self._owned: list[RivalLayer] = [layer for layer in layers if isinstance(layer, RivalLayer)]
        self._model, self._text = model, text
        self._attention = attention_module(model, self._managed[0])
        self.device = next(self._attention.parameters()).device
        self._num_heads = int(text.num_attention_heads)
        self._num_kv_heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        self._head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        self._dtype: torch.dtype = model.dtype
        rival.check(self.kv_shape, self._head_dim)
        enable(model)
        self.forget()

    # ---- what a caller may ask ----------------------------------------------------------------------

    def forget(self) -> None:
        """Drops the sequence."""
        self._resident: list[Resident] = []
        self._staging: list[StagedLayer] = []
        self._pads: list[int] = []
        self._shift = torch.zeros(0, dtype=torch.int64)
        self.columns = 0
        self.prefill_peak_bytes = 0
        self.compress_seconds = 0.0
        self.only_watching = False
        """Set while another cache's prompt is being watched: staging then skips its own attention."""
        for layer in self._owned:
            layer.seen, layer.pending = 0, False

    def __bool__(self) -> bool:
        # As for QEvictCache: Phi-3 drops a truthy cache at a longrope border.
        kind = getattr(find_rotary(self._model), "rope_type", "default")
        return kind != "longrope"

    @property
    def storage(self) -> str:
        """ "real" or "simulated"."""
        return self.rival.storage

    @property
    def managed_layers(self) -> list[int]:
        """Model layers whose KV this cache manages."""
        return list(self._managed)

    @property
    def batch(self) -> int:
        """Batch rows; 0 before the first forward."""
        return len(self._pads)

    @property
    def kv_shape(self) -> KVShape:
        """Shape that byte figures are computed from, in the stored dtype."""
        stored = self.run.stored(self._dtype)
        return KVShape(len(self._managed), self._num_kv_heads, self._head_dim, stored.itemsize)

    @property
    def residents(self) -> list[Resident]:
        """What every managed layer keeps, once compressed."""
        return self._resident

    def persistent_tensors(self) -> dict[str, Tensor]:
        """All that survives to the next step, by layer and name; empty while the prompt is staged."""
        return {
            f"{index}.{name}": tensor
            for index, resident in enumerate(self._resident)
            for name, tensor in resident.tensors().items()
        }

    @property
    def persistent_bytes(self) -> int:
        """Summed `nbytes` of the persistent tensors, metadata included."""
        return sum(tensor.nbytes for tensor in self.persistent_tensors().values())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the storages behind them, spare room for planned tokens included."""
        return sum(resident.allocated_bytes() for resident in self._resident)

    def residency(self) -> Tensor:
        """uint8 [layers, H_kv, columns] of batch row 0: `Tier.FULL`, `QUANT`, `EVICTED`, or `EMPTY` for padding."""
        columns = self.columns
        if not self._resident:
            return torch.full((len(self._managed), self._num_kv_heads, columns), int(Tier.FULL), dtype=torch.uint8)
        rows = [resident.residency(columns)[0] for resident in self._resident]
        if self._staging:
            for row in rows:
                row[:, columns - self._staging[0].staged.key.shape[2] :] = int(Tier.FULL)
        out = torch.stack(rows).cpu()
        out[:, :, : self._pads[0]] = int(Tier.EMPTY)
        return out

    def settle(self) -> None:
        """Ends a staged prompt now, as the next single-token forward would.

        Raises:
            BudgetError: the budget does not hold what the rival must keep.
        """
        if not self._staging:
            return
        began = time.perf_counter()
        staged = [layer.staged for layer in self._staging]
        context = self._context()
        if self._resident:
            for resident, part in zip(self._resident, staged, strict=True):
                resident.absorb(part, context)
        else:
            self._resident = self.rival.compress(staged, context)
        self._staging = []
        self.compress_seconds += time.perf_counter() - began

    def _context(self) -> Context:
        return Context(
            run=self.run,
            shape=self.kv_shape,
            num_heads=self._num_heads,
            columns=self.columns,
            pads=list(self._pads),
            shift=self._shift,
            dtype=self.run.stored(self._dtype),
            device=self.device,
            scale=self._scale,
            softcap=self._softcap,
            rope=self._rope_table,
            model=self._model,
        )

    def _rope_table(self) -> RopeTable:
        types = getattr(self._text, "layer_types", None)
        table = RopeTable(find_rotary(self._model), types[self._managed[0]] if types else None, self.device)
        probe_layout(self._attention, table, self._head_dim)
        table.restart()
        table.ensure(self.columns + self.run.planned_new_tokens + 1)
        return table

    # ---- the path of one forward ---------------------------------------------------------------------

    def attend_module(
        self,
        module: nn.Module,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        """Stores the new keys and values of one managed layer and attends: [B, H_q, T, d] in and out."""
        tokens = query.shape[2]
        if not tokens:
            return torch.zeros_like(query)
        if layer == 0:
            self._begin(query, key, mask, position_ids, scale, softcap)
        self._owned[layer].seen += tokens
        if not self._staging:
            return self._resident[layer].step(query, key, value, scale, softcap)
        parts = self._resident[layer].parts(query, scale, softcap) if self._resident else []
        out = self._staging[layer].ingest(
            module,
            query,
            key,
            value,
            scale=scale,
            softcap=softcap,
            resident=parts,
            output_wanted=not self.only_watching,
        )
        if layer == len(self._owned) - 1:
            self.prefill_peak_bytes = max(self.prefill_peak_bytes, sum(part.nbytes for part in self._staging))
        return out

    def _begin(
        self,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        position_ids: Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> None:
        batch, heads, tokens, dim = query.shape
        if (heads, key.shape[1], dim) != (self._num_heads, self._num_kv_heads, self._head_dim):
            raise UnsupportedModelError(
                f"the configuration promises {self._num_heads} query heads, {self._num_kv_heads} KV heads of "
                f"{self._head_dim}; attention came with {heads}, {key.shape[1]} of {dim}."
            )
        if mask is not None and mask.dim() != 2:
            raise CacheUseError("this cache takes a 2D attention mask (padding) only, not a prepared 4D mask.")
        if not self.columns:
            self._dtype = key.dtype
            self._pads = left_pads(mask, batch, tokens)
            self._shift = position_shift(position_ids, batch, tokens)
        if batch != self.batch:
            raise CacheUseError(f"the cache holds {self.batch} batch rows, a forward of {batch} came.")
        if self._owned[-1].seen != self.columns:
            raise CacheUseError("an earlier forward with this cache did not finish: call reset() or build another one.")
        if tokens > 1 and mask is not None and self.columns:
            check_padding(mask, self._pads, self.columns + tokens)
        self._scale, self._softcap = scale, softcap
        if tokens == 1 and self.columns:
            self.settle()
        elif not self._staging:
            needs = self.rival.needs()
            self._staging = [StagedLayer(needs, self.columns, self._pads) for _ in self._owned]
        self.columns += tokens

    _scale: float = 1.0
    _softcap: float | None = None

    # ---- batch rows ------------------------------------------------------------------------------------

    def select_rows(self, index: Tensor) -> None:
        """Keeps, repeats or reorders batch rows; `index` holds old row numbers."""
        if not self.columns:
            return
        rows = index.to(self.device, torch.int64)
        self._pads = [self._pads[int(i)] for i in index.tolist()]
        self._shift = self._shift[index.cpu()]
        for staged in self._staging:
            staged.select(rows, self._pads)
        for resident in self._resident:
            resident.select(rows)
