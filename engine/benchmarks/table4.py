"""`bench table4`: TTFT, TPOT, throughput and bytes in the paper's terms (paper §3.6, Table 4).

Random weights in a Llama shape: the paper's 8B where memory allows, a small one on a CPU. Persistent
KV bytes, workspace and the process's peak are given apart from one another.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from engine import host
from engine.adapter import enable
from engine.benchmarks.decode import forward
from engine.cache import QEvictCache
from engine.config import QEvictConfig
from engine.errors import ModelTooLargeError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama configuration with random weights."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int

    @property
    def parameters(self) -> int:
        head = self.hidden_size // self.num_heads
        attention = self.hidden_size * head * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp) + 2 * self.vocab_size * self.hidden_size


MODELS = {
    "llama8b": ModelShape(4096, 14336, 32, 32, 8, 128_256),
    "small": ModelShape(512, 1408, 8, 8, 2, 8192),
}
PAPER = {
    "sdpa": {
        "full": {"ttft_ms": 689.3, "tpot_ms": 84.05, "tokens_per_s": 379.26},
        "qevict": {"ttft_ms": 692.4, "tpot_ms": 76.26, "tokens_per_s": 416.44},
    },
    "flash2": {
        "full": {"tpot_ms": 59.74, "tokens_per_s": 535.11, "peak_gb": 29.54},
        "qevict": {"ttft_ms": 772.0, "tpot_ms": 146.35, "tokens_per_s": 218.05, "peak_gb": 20.78},
    },
}
"""The article's figures: Llama-3.1-8B, 256 + 1,024 tokens, batch 32, one A100-80GB. Not measured here."""


def build(shape: ModelShape, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A Llama with random weights.

    Raises:
        ModelTooLargeError: its weights do not fit the memory that is free.
    """
    need = shape.parameters * dtype.itemsize
    free = torch.cuda.mem_get_info()[0] if device.startswith("cuda") else host.free_memory_bytes()
    if free is not None and need * 1.2 > free:
        raise ModelTooLargeError(
            f"this shape needs {need / 1e9:.1f} GB of weights, {free / 1e9:.1f} GB are free on {device}: "
            "take --shape small, or a larger machine."
        )
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def measure(
    model: PreTrainedModel,
    *,
    prompt_tokens: int,
    new_tokens: int,
    batch: int,
    budget: float = 0.2,
    backends: tuple[str, ...] = ("fused", "sdpa"),
    repeats: int = 1,
) -> Iterator[dict[str, Any]]:
    """One row per system; FullKV first. Systems take turns `repeats` times and medians are given."""
    device = next(model.parameters()).device
    vocabulary = model.config.vocab_size
    ids = torch.randint(5, vocabulary - 1, (batch, prompt_tokens), generator=torch.Generator().manual_seed(0)).to(
        device
    )
    rows: dict[str, list[dict[str, Any]]] = {}
    enable(model)
    for _ in range(repeats):
        for name in ("full", *backends):
            if name == "full":
                cache: Any = DynamicCache(config=model.config)
            else:
                cache = QEvictCache(model, QEvictConfig(kv_budget=budget, planned_new_tokens=new_tokens, backend=name))
            rows.setdefault(name, []).append(_one(model, cache, ids, new_tokens, device))
    full = sorted(row["tpot_ms"] for row in rows["full"])[len(rows["full"]) // 2]
    for name, found in rows.items():
        middle = sorted(found, key=lambda row: row["tpot_ms"])[len(found) // 2]
        yield {
            "system": name,
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "batch": batch,
            "kv_budget": 1.0 if name == "full" else budget,
            **middle,
            "speed_against_full": full / middle["tpot_ms"],
        }


def _one(
    model: PreTrainedModel, cache: Any, ids: torch.Tensor, new_tokens: int, device: torch.device
) -> dict[str, Any]:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    began = now()
    token = forward(model, ids, cache)[:, -1].argmax(-1, keepdim=True)
    first = now()
    for _ in range(new_tokens - 1):
        token = forward(model, token, cache)[:, -1].argmax(-1, keepdim=True)
    last = now()
    tpot = (last - first) / max(1, new_tokens - 1)
    if isinstance(cache, QEvictCache):
        persistent = cache.pool_bytes
        workspace = cache.prefill_peak_bytes + cache.scoring_bytes + cache.workspace_bytes
    else:
        persistent = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        workspace = 0
    return {
        "ttft_ms": (first - began) * 1e3,
        "tpot_ms": tpot * 1e3,
        "tokens_per_s": ids.shape[0] / tpot,
        "persistent_kv_bytes": persistent,
        "workspace_bytes": workspace,
        "process_peak_bytes": _peak(device),
    }


def _peak(device: torch.device) -> int:
    """Peak memory so far: of the device where it can tell, else of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
