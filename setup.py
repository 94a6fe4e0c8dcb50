"""Builds the optional CPU kernels; everything else is declared in pyproject.toml.

The kernels are one source compiled once for each instruction set and chosen at run time, so a build made on one
machine runs on another. A machine without a C compiler installs without them, and the product says so.
"""

from __future__ import annotations

import platform
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

KERNELS = Path("engine/attention/kernels")
COMMON = ["-O3", "-std=gnu11", "-fvisibility=hidden", "-fno-math-errno"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]


class BuildKernels(build_ext):
    """Compiles every unit with its own flags; an instruction set that the compiler lacks is left out."""

    def build_extension(self, ext: Extension) -> None:
        if self.compiler.compiler_type != "unix":
            raise CompileError("the kernels need gcc or clang")
        x86 = platform.machine().lower() in ("x86_64", "amd64")
        units = [("avx2", AVX2), ("avx512", AVX512)] if x86 else []
        temporary = Path(self.build_temp)
        for name, flags in units:
            source = str(KERNELS / f"unit_{name}.c")
            if not self._accepts(flags):
                continue
            ext.extra_objects += self.compiler.compile(
                [source], output_dir=str(temporary), extra_postargs=COMMON + flags, depends=ext.depends
            )
            ext.define_macros.append((f"QE_HAS_{name.upper()}", "1"))
        super().build_extension(ext)

    def _accepts(self, flags: list[str]) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder) / "probe.c"
            probe.write_text("int probe(void) { return 0; }\n", encoding="utf-8")
            try:
                self.compiler.compile([str(probe)], output_dir=folder, extra_postargs=[*flags, "-Werror"])
            except CompileError as error:
                print(f"this compiler lacks {flags[-1]}: {error}")
                return False
        return True


setup(
    ext_modules=[
        Extension(
            "engine.attention._kernels",
            sources=[str(KERNELS / name) for name in ("dispatch.c", "pool.c", "unit_portable.c")],
            depends=[str(path) for path in sorted(KERNELS.glob("*.h"))],
            extra_compile_args=COMMON,
            libraries=["m", "pthread"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
