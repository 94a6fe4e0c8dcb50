"""The Triton kernels without a GPU: agreement with the twin in Triton's interpreter, and builds for real devices."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.attention import unavailable

ROOT = Path(__file__).parents[3]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="package triton is not installed: the CUDA kernels cannot be interpreted or compiled here",
)


def run(*command: str, **environment: str) -> str:
    """Output of a Python process; it must succeed."""
    result = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    return result.stdout


@needs_triton
@pytest.mark.timeout(1800)  # the interpreter is slow, and slower on a loaded machine
def test_kernels_agree_with_the_twin_in_the_interpreter() -> None:
    """A process of its own: Triton reads the switch when it is imported."""
    cases = str(Path(__file__).with_name("interpreter_cases.py"))
    said = run("-m", "pytest", "-q", "-p", "no:cacheprovider", cases, TRITON_INTERPRET="1")
    assert " passed" in said and "skipped" not in said, said[-2000:]


@needs_triton
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", (80, 90))
def test_kernels_compile_for_a_device_that_is_not_here(architecture: int, tmp_path: Path) -> None:
    """Every kernel becomes machine code, and none spills registers in its usual shape."""
    if importlib.util.find_spec("triton.backends.nvidia") is None:
        pytest.skip("this build of triton brings no NVIDIA compiler")
    code = (
        "from engine.benchmarks.gpu_build import KERNELS, build, shape\n"
        f"for kernel in KERNELS: print(build(kernel, shape(3, 64), {architecture}).to_dict())\n"
    )
    said = run("-c", code, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    lines = said.strip().splitlines()
    assert len(lines) == 5
    for line in lines:
        assert f"'architecture': {architecture}" in line and "'stack_bytes': 0" in line, line


def test_a_cuda_run_without_triton_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    reason = unavailable("fused", "cuda:0", 64)
    assert reason is not None and "triton" in reason and "sdpa" in reason


def test_what_the_cuda_kernels_cannot_serve_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.7.1"))
    assert unavailable("fused", "cuda:0", 256) is None
    assert "head_dim" in (unavailable("fused", "cuda:0", 320) or "")
    assert "xpu" in (unavailable("fused", "xpu", 64) or "")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.4.0"))
    assert "3.5" in (unavailable("fused", "cuda:0", 64) or "")
