"""One prepared script for a machine with a GPU: is the Triton backend right there, and how fast is it?

    python -m engine.benchmarks.gpu_check [--json out.json] [--quick] [--checks] [--cells]

First correctness, every kernel and both flash kernels of flash2 against the float32 twin on the CPU; a captured CUDA
graph; how often an event makes the host wait; a small model. Then decode attention against torch's SDPA, and
`bench table4`. A check that fails or raises is a row like the others, and the rest go on. Ends with status 1 where
something disagrees. With TRITON_INTERPRET=1 and no GPU only the kernels' checks run, interpreted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from engine.adapter import enable
from engine.attention import fused_cuda, triton_columns
from engine.attention.eager import EagerBackend
from engine.attention.flash2_cuda import Flash2Backend
from engine.attention.flash_arena import FlashKernel, PackageKernel, torch_kernel
from engine.attention.fused_cuda import FusedCudaBackend
from engine.attention.sdpa import SdpaBackend
from engine.attention.softmax import attend
from engine.attention.state import KVState
from engine.benchmarks import table4
from engine.benchmarks.attention import SHAPES, filled_state
from engine.benchmarks.decode import forward
from engine.benchmarks.gpu_cases import (
    HEAD_DIMS,
    QUICK,
    SPECIAL,
    Case,
    covering,
    distance,
    filled,
    moved,
    new_token,
    on,
)
from engine.cache import QEvictCache
from engine.config import QEvictConfig
from engine.errors import EngineError
from engine.scores import Ranker, prompt_column_masses

CELLS = ((256, 1024, 32), (4096, 256, 1), (4096, 256, 32), (2048, 512, 1), (2048, 512, 32), (1024, 1024, 1))


Check = tuple[str, Callable[[], dict[str, Any]]]
"""A name, and what gives a row with "passed" in it."""


def decode_checks(device: torch.device, cases: Sequence[Case]) -> Iterator[Check]:
    """Decode of backend fused, and of flash2 with each flash kernel that is here."""
    for case in cases:
        if case.dtype == "bfloat16" and device.type == "cpu":
            continue  # the interpreter multiplies bit patterns
        yield f"decode {case}", partial(check_decode, device, case, None)
        if case.dtype == "float32" and device.type == "cuda":
            continue
        for name, kernel in flash_kernels():
            if case.softcap is None or kernel is not torch_kernel:
                yield f"flash2 by {name} {case}", partial(check_decode, device, case, kernel)


def flash_kernels() -> list[tuple[str, FlashKernel]]:
    """torch's kernel, and the package's where it is installed."""
    try:
        return [("torch", torch_kernel), ("package", PackageKernel())]
    except ImportError:
        return [("torch", torch_kernel)]


def check_decode(device: torch.device, case: Case, flash: FlashKernel | None) -> dict[str, Any]:
    """Errors of output and masses relative to the twin, beside those of torch's own arithmetic in that dtype."""
    mine, twin = filled(case, device)
    usual_state, _ = filled(case, device)
    query, key, value = new_token(case)
    call: dict[str, Any] = {"scale": case.head_dim**-0.5, "softcap": case.softcap}
    plain, _ = SdpaBackend().decode(usual_state, 0, *on(device, query, key, value), **call)
    ranker = Ranker(mine.config)
    backend = FusedCudaBackend(ranker) if flash is None else Flash2Backend(ranker, flash)
    out, _ = backend.decode(mine, 0, *on(device, query, key, value), **call)
    want, _ = EagerBackend().decode(twin, 0, query.float(), key, value, **call)
    error, usual = distance(out, want), distance(plain, want)
    mass = distance(mine.pool.ledger_scores, twin.pool.ledger_scores)
    if flash is None:  # flash2 scores the arena's windows at the event
        mass = max(mass, distance(mine.pool.arena_scores, twin.pool.arena_scores))
    unit = float(torch.finfo(query.dtype).eps)
    stored = torch.equal(mine.pool.arena_key.cpu(), twin.pool.arena_key)
    passed = stored and error <= max(2 * usual, 2 * unit, 5e-5) and mass <= max(8 * unit, 1e-4)
    return {"error": error, "error_of_sdpa": usual, "mass_error": mass, "passed": passed}


def prompt_checks(device: torch.device) -> Iterator[Check]:
    """Prompt attention with its log-sum-exp, and column sums, for every head_dim and dtype."""
    for dim in HEAD_DIMS:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            if dtype == torch.bfloat16 and device.type == "cpu":
                continue
            yield f"prompt attention {dtype} d={dim}", partial(check_prompt, device, dtype, dim)
            yield f"prompt columns {dtype} d={dim}", partial(check_columns, device, dtype, dim)


def _prompt(dtype: torch.dtype, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value of 300 tokens, and the float32 twin's output and log-sum-exp."""
    torch.manual_seed(dim)
    query = torch.randn(1, 6, 300, dim).to(dtype)
    key, value = (torch.randn(1, 2, 300, dim).to(dtype) for _ in range(2))
    want, lse = attend(query.float(), key.float(), value.float(), scale=dim**-0.5, causal=True)
    return query, key, value, want, lse


def check_prompt(device: torch.device, dtype: torch.dtype, dim: int) -> dict[str, Any]:
    """Causal attention and its log-sum-exp, against float32 on the CPU."""
    query, key, value, want, want_lse = _prompt(dtype, dim)
    out, lse = attend(*on(device, query, key, value), scale=dim**-0.5, causal=True)
    unit = float(torch.finfo(dtype).eps)
    error, lse_error = distance(out, want), float((lse.cpu() - want_lse).abs().max())
    passed = error <= max(4 * unit, 1e-5) and lse_error <= max(8 * unit, 1e-4)
    return {"error": error, "lse_error": lse_error, "passed": passed}


def check_columns(device: torch.device, dtype: torch.dtype, dim: int) -> dict[str, Any]:
    """Column sums from log-sum-exps, against float32 on the CPU."""
    query, key, _, _, lse = _prompt(dtype, dim)
    columns = prompt_column_masses(
        query.float(),
        key.float(),
        lse,
        scale=dim**-0.5,
        softcap=None,
        query_start=0,
        key_start=0,
        first_valid=0,
        weights=None,
        power=1.0,
    )
    found = triton_columns.column_masses(
        *on(device, query[0], key[0], lse[0]), scale=dim**-0.5, window_size=1, groups=query.shape[1]
    )
    error = distance(found, columns)
    return {"error": error, "passed": error <= max(4 * float(torch.finfo(dtype).eps), 1e-5)}


@torch.inference_mode()
def check_model(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """A small Llama, prompt and 40 tokens: logits of fused and flash2 against eager, all in the model's dtype."""
    model = table4.build(table4.MODELS["small"], str(device), dtype)
    enable(model)
    ids = torch.randint(5, 8000, (2, 440), generator=torch.Generator().manual_seed(0)).to(device)
    logits = {}
    for name in ("fused", "sdpa", "eager", *(() if dtype == torch.float32 else ("flash2",))):
        cache = QEvictCache(model, QEvictConfig(kv_budget=0.3, planned_new_tokens=40, backend=name))
        steps = [forward(model, ids[:, :400], cache)[:, -1]]
        steps += [forward(model, ids[:, at : at + 1], cache)[:, -1] for at in range(400, 440)]
        logits[name] = torch.stack(steps).float()
    errors = {name: distance(found, logits["eager"]) for name, found in logits.items() if name != "eager"}
    # Routing may tip over a near tie in half precision: then all differ alike.
    limit = max(2 * errors["sdpa"], 1e-4 if dtype == torch.float32 else 0.05)
    return {"errors": errors, "passed": all(error <= limit for error in errors.values())}


@torch.inference_mode()
def check_waits(device: torch.device, backend: str) -> dict[str, Any]:
    """A routing event makes the host wait once, and a step between two events never."""
    model = table4.build(table4.MODELS["small"], str(device), torch.bfloat16)
    enable(model)
    cache = QEvictCache(model, QEvictConfig(kv_budget=0.3, planned_new_tokens=64, backend=backend))
    ids = torch.randint(5, 8000, (1, 464), generator=torch.Generator().manual_seed(0)).to(device)
    forward(model, ids[:, :400], cache)
    waits: list[int] = []
    event = cache._route

    def counted() -> None:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                event()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchron" in str(one.message) for one in told))

    cache._route = counted  # type: ignore[method-assign]
    for at in range(400, 464):
        forward(model, ids[:, at : at + 1], cache)
    # The first event allocates the pools and uploads constants.
    return {"waits": waits, "passed": len(waits) > 4 and max(waits[1:]) <= 1}


def check_graph(device: torch.device) -> dict[str, Any]:
    """A decode step captured in a CUDA graph and replayed gives what a plain step gives."""
    case = Case(4, 128, "float16")
    (mine, _), (plain, _) = filled(case, device), filled(case, device)
    query, key, value = on(
        device, *(torch.randn(case.batch, heads, 1, case.head_dim).half() for heads in (2 * case.group, 2, 2))
    )
    call: dict[str, Any] = {"scale": case.head_dim**-0.5, "softcap": None}
    backend, other = FusedCudaBackend(Ranker(mine.config)), FusedCudaBackend(Ranker(plain.config))
    backend.decode(mine, 0, query, key, value, **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = backend.decode(mine, 0, query, key, value, **call)
    graph.replay()
    for _ in range(2):
        want, _ = other.decode(plain, 0, query, key, value, **call)
    error = distance(out, want)
    mass = distance(mine.pool.ledger_scores, plain.pool.ledger_scores)
    return {"error": error, "mass_error": mass, "passed": max(error, mass) < 1e-6}


def time_attention(device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    """Decode attention of one layer in a CUDA graph, over several layers in turn: SDPA, and ours by stages."""
    bandwidth = read_bandwidth(device)
    for name, context, batch in (("llama8b", 1280, 32), ("llama8b", 8192, 8), ("llama8b", 32768, 1)):
        shape = SHAPES[name]
        for budget in (0.2,) if quick else (0.2, 0.1):
            layers = 4
            config = QEvictConfig(kv_budget=budget, kv_dtype="float16")
            state = moved(filled_state(shape, config, context, batch, layers, torch.float16), device)
            query = torch.randn(batch, shape.num_heads, 1, shape.head_dim, device=device).half()
            new = torch.randn(batch, shape.num_kv_heads, 1, shape.head_dim, device=device).half()
            size = (batch, shape.num_kv_heads, context, shape.head_dim)
            whole = [torch.randn(2, *size, device=device, dtype=torch.float16) for _ in range(layers)]

            row: dict[str, Any] = {"shape": name, "context": context, "batch": batch, "kv_budget": budget}
            row["sdpa_us"] = in_graph(partial(all_sdpa, query, whole)) / layers
            for stages in (1, 2, 3):
                backend = FusedCudaBackend(Ranker(config))
                backend.stages = stages

                work = partial(all_layers, backend, state, query, new)
                row[f"fused_{stages}_us"] = in_graph(work) / layers
            best = min(row[f"fused_{stages}_us"] for stages in (1, 2, 3))
            costs, per_layer = state.pool.plans[0].costs, state.shape.rows_per_layer
            read = int(state.pool.arena_count[:per_layer].sum()) * costs.full
            read += int(state.pool.live_count[:per_layer].sum()) * costs.quant
            row["ratio_to_sdpa"] = row["sdpa_us"] / best
            row["share_of_read_limit"] = read / state.shape.groups / bandwidth / (best * 1e-6)
            yield row


def all_layers(backend: FusedCudaBackend, state: KVState, query: Tensor, new: Tensor) -> None:
    """One decode step of attention."""
    for layer in range(state.shape.num_layers):
        backend.decode(state, layer, query, new, new, scale=query.shape[-1] ** -0.5, softcap=None)


def all_sdpa(query: Tensor, whole: list[Tensor]) -> None:
    """The same over full caches, as transformers calls torch."""
    for pair in whole:
        F.scaled_dot_product_attention(query, pair[0], pair[1], enable_gqa=True)


def in_graph(work: Callable[[], object], rounds: int = 20) -> float:
    """Microseconds of captured work, median of `rounds` replays."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    taken: list[float] = []
    for _ in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(float(start.elapsed_time(end)) * 1e3)
    return sorted(taken[3:])[rounds // 2]


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of a plain read: a sum over 2 GiB."""
    data = torch.ones(2**29, device=device)
    return data.nbytes / (in_graph(lambda: data.sum()) * 1e-6)


def checks(device: torch.device, quick: bool) -> Iterator[Check]:
    """All checks, the quickest to fail first."""
    yield from decode_checks(device, QUICK if quick else [*covering(), *SPECIAL])
    yield from prompt_checks(device)
    if device.type == "cuda":
        yield "captured graph", partial(check_graph, device)
        for backend in ("fused", "flash2"):
            yield f"waits of an event, {backend}", partial(check_waits, device, backend)
        for dtype in (torch.float32, torch.bfloat16):
            yield f"model {dtype}", partial(check_model, device, dtype)


def attempt(name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A check's row; what it raises is a failure like any other, and costs no other check."""
    try:
        return {"check": name, **work()}
    except (EngineError, RuntimeError, ValueError, TypeError, triton.TritonError) as error:
        return {"check": name, "passed": False, "error_text": f"{type(error).__name__}: {error}"[:2000]}


def lost(device: torch.device) -> bool:
    """Whether the device answers no more, as after an illegal access: then nothing else can be learned here."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def run(arguments: argparse.Namespace, say: Callable[[str, dict[str, Any]], None]) -> bool:
    """Checks, then timings; whether everything passed and was measured."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda:0" if cuda else "cpu")
    name = torch.cuda.get_device_name(device) if cuda else "none; interpreted"
    flash = [kernel for kernel, _ in flash_kernels()]
    say("machine", {"device": name, "torch": torch.__version__, "triton": triton.__version__, "flash": flash})
    failed: list[str] = []
    count = 0
    for check, work in checks(device, arguments.quick):
        row = attempt(check, work)
        say("check", row)
        count += 1
        if not row["passed"]:
            failed.append(check)
            if lost(device):
                say("summary", {"checks": count, "failed": failed, "device_lost": True})
                return False
    say("summary", {"checks": count, "failed": failed})
    if not cuda or arguments.checks:
        return not failed
    # Of a kernel that errs a time means little, and the rows say so; the others are still worth having.
    say("note", {"all_checks_passed": not failed})
    backends = ("fused",) if any("flash2" in name or "model" in name for name in failed) else ("fused", "flash2")
    for kind, rows in timings(device, arguments, backends):
        try:
            for row in rows:
                say(kind, row)
        except (EngineError, RuntimeError, triton.TritonError) as error:
            failed.append(kind)
            say(kind, {"error_text": f"{type(error).__name__}: {error}"[:2000]})
            if lost(device):
                return False
    return not failed


def timings(
    device: torch.device, arguments: argparse.Namespace, backends: tuple[str, ...]
) -> Iterator[tuple[str, Iterator[dict[str, Any]]]]:
    """Decode attention, then cells of `bench table4`, each apart so that one that fails costs no other."""
    yield "attention", time_attention(device, arguments.quick)
    wanted = "small" if arguments.quick else "llama8b"
    model = table4.build(table4.MODELS[wanted], str(device), torch.bfloat16)
    for prompt, new, batch in CELLS if arguments.cells else CELLS[:1]:
        new = min(new, 64) if arguments.quick else new
        rows = table4.measure(model, prompt_tokens=prompt, new_tokens=new, batch=batch, backends=backends)
        yield "table4", ({"shape": wanted, **row} for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all rows there")
    parser.add_argument("--quick", action="store_true", help="a small model and one budget: about two minutes")
    parser.add_argument("--checks", action="store_true", help="no timings")
    parser.add_argument("--cells", action="store_true", help="six cells of prompt, new tokens and batch, not one")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not fused_cuda.interpreted():
        print("no CUDA device here: run this on a machine with one, or set TRITON_INTERPRET=1.", file=sys.stderr)
        return 2
    began, rows = time.perf_counter(), []

    def say(kind: str, row: dict[str, Any]) -> None:
        rows.append({"kind": kind, **row})
        print(f"{time.perf_counter() - began:6.1f} s  {kind}: {json.dumps(row)}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")

    return 0 if run(arguments, say) else 1


if __name__ == "__main__":
    raise SystemExit(main())
