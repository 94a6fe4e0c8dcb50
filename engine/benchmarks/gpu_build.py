"""Compiles the Triton kernels for GPUs that are not there, and reads registers and spills from the result.

    python -m engine.benchmarks.gpu_build            all kernels, sm_80 and sm_90, head_dim 64 and 128

Nothing runs: no timing and no result comes from here. Needs the package triton with its ptxas and cuobjdump.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention import triton_columns, triton_decode, triton_merge
from engine.attention.triton_shape import KernelShape
from engine.errors import BackendError

KERNELS = ("prepare", "arena", "ledger", "merge", "columns")
ARCHITECTURES = (80, 90)

_TYPES = {
    "key_codes": "*u8",
    "value_codes": "*u8",
    **dict.fromkeys(("key_scale", "key_zero", "value_scale", "value_zero"), "*fp16"),
    **dict.fromkeys(("arena_count", "live_count", "clock", "pads", "shift", "arena_ids", "ledger_ids"), "*i32"),
    **dict.fromkeys(
        ("cos", "sin", "part_out", "part_lse", "raw", "raw_arena", "raw_ledger", "lse", "weights", "mass"), "*fp32"
    ),
    **dict.fromkeys(("arena_scores", "ledger_scores"), "*fp32"),
    **dict.fromkeys(("scale", "softcap", "power"), "fp32"),
}


@dataclass(frozen=True, slots=True)
class Build:
    """What one kernel became.

    Attributes:
        registers: of a thread. stack_bytes: of a thread, spilled registers; 0 is wanted.
        shared_bytes: of a program. instructions: in the whole kernel.
    """

    kernel: str
    architecture: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    instructions: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def shape(group: int = 4, head_dim: int = 128, **changes: Any) -> KernelShape:
    """A common shape: INT2, windows of 8, float16 throughout."""
    base = KernelShape(
        group=group,
        head_dim=head_dim,
        heads_per_row=8,
        window=8,
        grid_offset=4,
        half=head_dim // 2,
        rope_scale=1.0,
        bits=2,
        value_groups=1,
        capped=False,
        masses=True,
        wide_arena=False,
        wide_ledger=False,
        assembly=True,
    )
    return replace(base, **changes)


def build(kernel: str, kernels: KernelShape, architecture: int, dtype: str = "fp16") -> Build:
    """Compiles one kernel for sm_`architecture`; `dtype` is that of queries and arena (fp16, bf16, fp32).

    Raises:
        BackendError: the result cannot be read.
    """
    if kernel == "columns":
        function, constants = (
            triton_columns.columns,
            {
                **triton_columns.constants(kernels.group, kernels.head_dim, dtype == "fp32"),
                "CAPPED": kernels.capped,
                "WEIGHTED": False,
            },
        )
        options = triton_columns.OPTIONS
    else:
        function = triton_merge.merge if kernel == "merge" else getattr(triton_decode, kernel)
        constants = getattr(kernels, kernel)()
        options = kernels.options(kernel)
    pointers = {name: f"*{dtype}" for name in ("query", "key", "value", "arena_key", "arena_value", "out")}
    pointers["turned"] = "*fp32" if kernels.wide_ledger else "*fp16"
    signature: dict[str, str] = {}
    fixed: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], Any] = {}
    for place, name in enumerate(function.arg_names):
        if name in constants:
            signature[name], fixed[(place,)] = "constexpr", constants[name]
            continue
        signature[name] = {**_TYPES, **pointers}.get(name, "i32")
        if signature[name].startswith("*") and not function.params[place].do_not_specialize:
            hints[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, fixed, hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    return _read(kernel, architecture, compiled.asm["cubin"], int(compiled.metadata.shared))


def _read(kernel: str, architecture: int, binary: bytes, shared: int) -> Build:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage, listing = (
            subprocess.run([str(tool), flag, file.name], capture_output=True, text=True, check=False).stdout
            for flag in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise BackendError(f"cuobjdump tells no registers of kernel {kernel} for sm_{architecture}")
    instructions = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+\S", listing, re.MULTILINE))
    return Build(kernel, architecture, int(found[1]), int(found[2]), shared, instructions)


def main() -> None:
    """Prints one line per kernel, shape and architecture."""
    for architecture in ARCHITECTURES:
        for group, head_dim in ((3, 64), (4, 128)):
            for kernel in KERNELS:
                one = build(kernel, shape(group, head_dim), architecture)
                print(
                    f"sm_{architecture}  d={head_dim} G={group}  {kernel:8} {one.registers:4} registers "
                    f"{one.stack_bytes:5} B spilled {one.shared_bytes:6} B shared {one.instructions:6} instructions"
                )


if __name__ == "__main__":
    main()
