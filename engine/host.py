"""What this machine has: free memory, cores, instruction sets. Read from the system, never changed.

Knows nothing of models. A figure that the system does not tell is None, never a guess.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

_KNOWN_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_tile")


def total_memory_bytes() -> int | None:
    """Physical memory of the machine, or of the container where that is less."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
    limit = _container_limit()
    return total if limit is None else min(total, limit)


def free_memory_bytes() -> int | None:
    """Memory that a program can still take without swapping, or None where the system does not tell."""
    free = _linux_available()
    if free is None:
        free = _macos_available()
    limit, used = _container_limit(), _container_used()
    if free is not None and limit is not None and used is not None:
        return max(0, min(free, limit - used))
    return free


def num_cores() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def isa_flags() -> tuple[str, ...]:
    """Vector instruction sets that matter to the kernels, by their usual names."""
    machine = platform.machine().lower()
    if machine in ("arm64", "aarch64"):
        return ("neon",)
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        match = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
        present = set(match.group(1).split()) if match else set()
    except OSError:
        present = set(_command("sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features").lower().split())
    return tuple(flag for flag in _KNOWN_FLAGS if flag in present)


def _linux_available() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None


def _macos_available() -> int | None:
    if platform.system() != "Darwin":
        return None
    text = _command("vm_stat")
    size = re.search(r"page size of (\d+) bytes", text)
    pages = [int(count) for count in re.findall(r"^Pages (?:free|inactive|purgeable):\s+(\d+)", text, re.MULTILINE)]
    return int(size.group(1)) * sum(pages) if size and pages else None


def _container_limit() -> int | None:
    return _cgroup_number("/sys/fs/cgroup/memory.max")


def _container_used() -> int | None:
    return _cgroup_number("/sys/fs/cgroup/memory.current")


def _cgroup_number(path: str) -> int | None:
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _command(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
