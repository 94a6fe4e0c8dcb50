"""Published byte costs and operating points, by the accountants alone: fractions of FullKV in float16."""

from __future__ import annotations

import pytest

from engine.baselines import registry
from engine.baselines.base import RunPlan
from engine.budget import INDEX_BYTES, KVShape, window_costs
from engine.config import QEvictConfig

SMOL, LLAMA, QWEN = KVShape(30, 3, 64, 2), KVShape(32, 8, 128, 2), KVShape(28, 4, 128, 2)


@pytest.mark.parametrize(
    ("shape", "full", "int2", "int4", "wide"),
    [(SMOL, 6144, 1632, 2400, 4224), (LLAMA, 32768, 8448, 12544, 21504), (QWEN, 16384, 4224, 6272, 10752)],
)
def test_windows_cost_what_the_formulas_say(shape: KVShape, full: int, int2: int, int4: int, wide: int) -> None:
    """Full and Quant windows of 8 tokens, INT4, and INT2 windows of 32; 8 bytes of index on top."""
    costs = window_costs(QEvictConfig(), shape)
    assert (costs.full - INDEX_BYTES, costs.quant - INDEX_BYTES) == (full, int2)
    assert window_costs(QEvictConfig(bits=4), shape).quant - INDEX_BYTES == int4
    assert window_costs(QEvictConfig(window_size=32, routing_interval=None), shape).quant - INDEX_BYTES == wide
    elements = 2 * shape.num_kv_heads * shape.head_dim * 8
    assert int2 * 8 / elements == pytest.approx(4.25 if shape is SMOL else 4.125)


@pytest.mark.parametrize(
    ("shape", "tokens", "shares"),
    [
        (SMOL, 1024, {"kivi-2": 0.238, "kivi-4": 0.356, "nuq2": 0.163, "nuq3": 0.225, "nuq4": 0.288, "zip": 0.208}),
        (SMOL, 4096, {"kivi-2": 0.200, "kivi-4": 0.323, "nuq2": 0.161, "nuq3": 0.224, "nuq4": 0.286, "zip": 0.206}),
        (LLAMA, 4096, {"kivi-2": 0.200, "kivi-4": 0.323, "nuq2": 0.148, "nuq3": 0.211, "nuq4": 0.273, "zip": 0.202}),
        (LLAMA, 32768, {"kivi-2": 0.189, "kivi-4": 0.314, "nuq2": 0.148, "nuq3": 0.211, "nuq4": 0.273, "zip": 0.201}),
        (QWEN, 32768, {"kivi-2": 0.189, "kivi-4": 0.314, "nuq2": 0.151, "nuq3": 0.213, "nuq4": 0.276, "zip": 0.202}),
    ],
)
def test_operating_points(shape: KVShape, tokens: int, shares: dict[str, float]) -> None:
    full = shape.full_kv_bytes(tokens)
    found = {}
    for name in shares:
        system = {"zip": "zipcache"}.get(name, f"kvquant-{name}" if name.startswith("nuq") else name)
        found[name] = registry.rival(system).account(shape, tokens, 0, RunPlan()) / full
    assert found == pytest.approx(shares, abs=0.0025)


@pytest.mark.parametrize("shape", [SMOL, LLAMA, QWEN])
def test_operating_points_of_the_stock_quantized_cache(shape: KVShape) -> None:
    for bits, share in ((4, 0.281), (2, 0.156)):
        rival = registry.rival("hf-quantized", {"bits": bits})
        assert rival.account(shape, 4096, 0, RunPlan()) / shape.full_kv_bytes(4096) == pytest.approx(share, abs=5e-4)
