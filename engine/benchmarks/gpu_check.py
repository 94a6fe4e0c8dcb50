"""One prepared script for a machine with a GPU: is the Triton backend right there, and how fast is it?

    python -m engine.benchmarks.gpu_check [--json out.json] [--quick] [--cells]

First correctness, every kernel against the float32 twin on the CPU; then a captured CUDA graph; then decode
attention against torch's SDPA; then `bench table4`. Ends with status 1 where something disagrees. With
TRITON_INTERPRET=1 and no GPU only the correctness part runs, interpreted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from engine.attention.fused_cuda import FusedCudaBackend
from engine.attention.sdpa import SdpaBackend
from engine.attention.softmax import attend
from engine.attention.state import KVState
from engine.benchmarks import table4
from engine.benchmarks.attention import SHAPES, HeadShape, filled_state
from engine.benchmarks.decode import forward
from engine.cache import QEvictCache
from engine.config import QEvictConfig
from engine.errors import EngineError
from engine.scores import Ranker, prompt_column_masses

CELLS = ((256, 1024, 32), (4096, 256, 1), (4096, 256, 32), (2048, 512, 1), (2048, 512, 32), (1024, 1024, 1))


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
    context: int = 700
    batch: int = 2


CASES = (
    Case(3, 64, "float16"),
    Case(3, 64, "bfloat16"),
    Case(3, 64, "float32"),
    Case(4, 128, "float16"),
    Case(4, 128, "bfloat16", bits=4),
    Case(4, 128, "float32", bits=4),
    Case(1, 80, "float16", window=4),
    Case(7, 96, "bfloat16", window=16, bits=4),
    Case(8, 256, "bfloat16", softcap=30.0),
    Case(8, 256, "float16", window=32, bits=4, context=1500),
    Case(4, 128, "bfloat16", value_group=32),
    Case(4, 128, "float16", scope="kv_head", window=16),
)


def filled(case: Case, device: torch.device) -> tuple[KVState, KVState]:
    """The same random pools on the device and on the CPU."""
    torch.manual_seed(case.head_dim + case.group)
    config = QEvictConfig(
        kv_budget=0.4,
        window_size=case.window,
        bits=case.bits,
        value_group_size=case.value_group,
        score_scope=case.scope,
        kv_dtype=case.dtype,
    )
    shape = HeadShape("check", 2 * case.group, 2, case.head_dim)
    twin = filled_state(shape, config, case.context, case.batch, 1, getattr(torch, case.dtype))
    torch.manual_seed(case.head_dim + case.group)
    mine = filled_state(shape, config, case.context, case.batch, 1, getattr(torch, case.dtype))
    for name, tensor in twin.pool.persistent_tensors().items():
        getattr(mine.pool, name).copy_(tensor)
    return moved(mine, device), twin


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


def check_decode(device: torch.device) -> Iterator[dict[str, Any]]:
    """Errors of output and masses relative to the twin, beside those of torch's own arithmetic in that dtype."""
    for case in CASES:
        mine, twin = filled(case, device)
        dtype = getattr(torch, case.dtype)
        if dtype == torch.bfloat16 and device.type == "cpu":
            continue  # the interpreter multiplies bit patterns
        query = torch.randn(case.batch, 2 * case.group, 1, case.head_dim).to(dtype)
        key, value = (torch.randn(case.batch, 2, 1, case.head_dim).to(dtype) for _ in range(2))
        call: dict[str, Any] = {"scale": case.head_dim**-0.5, "softcap": case.softcap}
        plain, _ = SdpaBackend().decode(
            moved(filled(case, device)[0], device), 0, *on(device, query, key, value), **call
        )
        out, _ = FusedCudaBackend(Ranker(mine.config)).decode(mine, 0, *on(device, query, key, value), **call)
        want, _ = EagerBackend().decode(twin, 0, query.float(), key, value, **call)
        error, usual = distance(out, want), distance(plain, want)
        mass = max(
            distance(mine.pool.arena_scores, twin.pool.arena_scores),
            distance(mine.pool.ledger_scores, twin.pool.ledger_scores),
        )
        unit = float(torch.finfo(dtype).eps)
        stored = torch.equal(mine.pool.arena_key.cpu(), twin.pool.arena_key)
        passed = stored and error <= max(2 * usual, 2 * unit, 5e-5) and mass <= max(8 * unit, 1e-4)
        yield {
            "check": f"decode {case}",
            "error": error,
            "error_of_sdpa": usual,
            "mass_error": mass,
            "passed": passed,
        }


def check_prompt(device: torch.device) -> Iterator[dict[str, Any]]:
    """Prompt attention with its log-sum-exp, and column sums, against float32 on the CPU."""
    for dtype, dim in ((torch.float32, 64), (torch.float16, 64), (torch.bfloat16, 128), (torch.float16, 80)):
        if dtype == torch.bfloat16 and device.type == "cpu":
            continue
        torch.manual_seed(dim)
        heads, kv_heads, tokens = 6, 2, 300
        query = torch.randn(1, heads, tokens, dim).to(dtype)
        key, value = (torch.randn(1, kv_heads, tokens, dim).to(dtype) for _ in range(2))
        scale, unit = dim**-0.5, float(torch.finfo(dtype).eps)
        out, lse = attend(*on(device, query, key, value), scale=scale, causal=True)
        want, want_lse = attend(query.float(), key.float(), value.float(), scale=scale, causal=True)
        error, lse_error = distance(out, want), float((lse.cpu() - want_lse).abs().max())
        yield {
            "check": f"prompt attention {dtype} d={dim}",
            "error": error,
            "lse_error": lse_error,
            "passed": error <= max(4 * unit, 1e-5) and lse_error <= max(8 * unit, 1e-4),
        }
        columns = prompt_column_masses(
            query.float(),
            key.float(),
            want_lse,
            scale=scale,
            softcap=None,
            query_start=0,
            key_start=0,
            first_valid=0,
            weights=None,
            power=1.0,
        )
        found = triton_columns.column_masses(
            *on(device, query[0], key[0], want_lse[0]), scale=scale, window_size=1, groups=heads
        )
        error = distance(found, columns)
        yield {"check": f"prompt columns {dtype} d={dim}", "error": error, "passed": error <= max(4 * unit, 1e-5)}


@torch.inference_mode()
def check_model(device: torch.device) -> Iterator[dict[str, Any]]:
    """A small Llama, prompt and 40 tokens: logits of backend fused against eager, both in the model's dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        model = table4.build(table4.MODELS["small"], str(device), dtype)
        enable(model)
        ids = torch.randint(5, 8000, (2, 440), generator=torch.Generator().manual_seed(0)).to(device)
        logits = {}
        for name in ("fused", "sdpa", "eager"):
            cache = QEvictCache(model, QEvictConfig(kv_budget=0.3, planned_new_tokens=40, backend=name))
            steps = [forward(model, ids[:, :400], cache)[:, -1]]
            steps += [forward(model, ids[:, at : at + 1], cache)[:, -1] for at in range(400, 440)]
            logits[name] = torch.stack(steps).float()
        error, usual = (distance(logits[name], logits["eager"]) for name in ("fused", "sdpa"))
        # Routing may tip over a near tie in half precision: then both differ alike.
        passed = error <= max(2 * usual, 1e-4 if dtype == torch.float32 else 0.05)
        yield {"check": f"model {dtype}", "error": error, "error_of_sdpa": usual, "passed": passed}


def check_graph(device: torch.device) -> dict[str, Any]:
    """A decode step captured in a CUDA graph and replayed gives what a plain step gives."""
    case = CASES[3]
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
    return {"check": "captured graph", "error": error, "mass_error": mass, "passed": max(error, mass) < 1e-6}


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


def on(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors on `device`."""
    return tuple(tensor.to(device) for tensor in tensors)


def distance(mine: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm of `theirs`; infinite where something is not a number."""
    mine, theirs = mine.double().cpu(), theirs.double().cpu()
    found = float((mine - theirs).norm() / theirs.norm().clamp_min(1e-12))
    return found if found == found else float("inf")


def run(arguments: argparse.Namespace, say: Callable[[str, dict[str, Any]], None]) -> bool:
    """All parts in order; whether every check passed."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda:0" if cuda else "cpu")
    name = torch.cuda.get_device_name(device) if cuda else "none; interpreted"
    say("machine", {"device": name, "torch": torch.__version__, "triton": triton.__version__})
    good = True
    parts: list[Callable[[], Any]] = [lambda: check_decode(device), lambda: check_prompt(device)]
    if cuda:
        parts += [lambda: check_model(device), lambda: iter([check_graph(device)])]
    for part in parts:
        try:
            for row in part():
                good &= bool(row["passed"])
                say("check", row)
        except (EngineError, RuntimeError, triton.TritonError) as error:
            # One broken part must not cost the others: time on such a machine is short.
            good = False
            say("check", {"check": "part ended early", "error_text": str(error)[:2000], "passed": False})
    if not cuda or not good:
        return good
    for row in time_attention(device, arguments.quick):
        say("attention", row)
    wanted = "small" if arguments.quick else "llama8b"
    model = table4.build(table4.MODELS[wanted], str(device), torch.bfloat16)
    for prompt, new, batch in CELLS if arguments.cells else CELLS[:1]:
        new = min(new, 64) if arguments.quick else new
        for row in table4.measure(model, prompt_tokens=prompt, new_tokens=new, batch=batch, backends=("fused",)):
            say("table4", {"shape": wanted, **row})
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all rows there")
    parser.add_argument("--quick", action="store_true", help="a small model and one budget: about two minutes")
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
