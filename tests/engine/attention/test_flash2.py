"""The flash kernels of flash2 against plain attention, which one is taken, and what is said where none can run.

The backend itself needs Triton's interpreter: see `interpreter_cases.py`.
"""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from engine.attention import flash2, make_backend, unavailable
from engine.attention.flash_arena import PackageKernel, Runs, check_types, torch_kernel
from engine.attention.softmax import attend
from engine.config import QEvictConfig
from engine.errors import BackendError
from engine.scores import Ranker


@pytest.mark.parametrize("begin", [[3, 3, 3], [3, 0, 7]])
@pytest.mark.parametrize("end", [[20, 20, 20], [20, 13, 9]])
@pytest.mark.parametrize("kernel", ["torch", "package"])
def test_a_run_of_tokens_is_what_a_mask_would_leave(
    kernel: str, begin: list[int], end: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 6, 1, 16), torch.randn(3, 2, 24, 16), torch.randn(3, 2, 24, 16)
    at = torch.arange(24)
    hidden = (at < torch.tensor(begin)[:, None]) | (at >= torch.tensor(end)[:, None])
    bias = torch.where(hidden, -1e30, 0.0)[:, None, None]
    wanted = attend(query, key, value, scale=0.3, bias=bias)
    spoilt = [torch.where(hidden[:, None, :, None], torch.nan, x) for x in (key, value)]

    def package(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: object) -> tuple[torch.Tensor, ...]:
        """As documented: [B, T, H, d], lengths counted from the cache's first token, padding on its left."""
        ends, left = call["cache_seqlens"], call["cache_leftpad"]
        assert isinstance(ends, torch.Tensor) and ends.dtype == torch.int32
        assert left is None or (isinstance(left, torch.Tensor) and left.dtype == torch.int32)
        outs = []
        for b in range(3):
            seen = slice(0 if left is None else int(left[b]), int(ends[b]))
            q_b, k_b, v_b = (x.transpose(1, 2) for x in (q[b : b + 1], k[b : b + 1, seen], v[b : b + 1, seen]))
            out, lse = attend(q_b, k_b, v_b, scale=float(str(call["softmax_scale"])))
            outs.append((out.transpose(1, 2), lse))
        return torch.cat([out for out, _ in outs]), torch.cat([lse for _, lse in outs])

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_with_kvcache=package))
    work = torch_kernel if kernel == "torch" else PackageKernel()
    runs = Runs(begin, torch.tensor(end, dtype=torch.int32), end)
    out, lse = work(query, *spoilt, scale=0.3, softcap=None, runs=runs)
    torch.testing.assert_close(out, wanted[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, wanted[1], atol=1e-5, rtol=1e-5)


def test_the_package_is_taken_where_it_is_and_torch_serves_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "flash_attn" else found(name))
    assert flash2.kernel() is torch_kernel
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_with_kvcache=print))
    assert isinstance(flash2.kernel(), PackageKernel)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(BackendError, match="does not load"):
        flash2.kernel()


def test_what_flash2_cannot_serve_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CUDA" in (unavailable("flash2", "cpu", 64) or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flash2.fused, "unavailable", lambda *given: "backend fused needs the package triton.")
    reason = unavailable("flash2", "cuda:0", 64) or ""
    assert "flash2" in reason and "triton" in reason
    monkeypatch.setattr(flash2.fused, "unavailable", lambda *given: None)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert unavailable("flash2", "cuda:0", 64) is None
    assert "multiple of 8" in (unavailable("flash2", "cuda:0", 100) or "")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "flash-attn" in (unavailable("flash2", "cuda:0", 64) or "")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    with pytest.raises(BackendError, match="kv_dtype"):
        make_backend("flash2", "cuda:0", Ranker(QEvictConfig(kv_dtype="float32")), 64)


def test_full_precision_is_refused_on_a_device_only() -> None:
    check_types(torch.zeros(1), torch.float32)
    on_device = SimpleNamespace(is_cuda=True, dtype=torch.float32)
    with pytest.raises(BackendError, match="float16 or bfloat16"):
        check_types(on_device, torch.float16)  # type: ignore[arg-type]
    half = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    check_types(half, torch.float16)  # type: ignore[arg-type]
    with pytest.raises(BackendError, match="caps its logits"):
        torch_kernel(half, half, half, scale=1.0, softcap=3.0, runs=Runs([0], torch.ones(1), [1]))  # type: ignore[arg-type]
