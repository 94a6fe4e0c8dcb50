"""What this machine can do: versions, memory, backends, kernels, the embedded model, the database.

Only looks: changes and downloads nothing. What is missing comes with the command that brings it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine import embedded, host
from engine.config import BACKENDS
from engine.errors import EngineError

PACKAGES = ("torch", "transformers", "gradio", "fastapi", "plotly", "sqlite-utils", "numpy", "safetensors", "gguf")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def diagnose() -> dict[str, Any]:
    """Everything that is known about this machine, ready for JSON."""
    return {
        "qevict": _version("qevict-lab"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "memory": {"total_bytes": host.total_memory_bytes(), "free_bytes": host.free_memory_bytes()},
        "cores": host.num_cores(),
        "isa": list(host.isa_flags()),
        "devices": _devices(),
        "model": _embedded_model(),
        "backends": _backends(),
        "kernel": _kernel(),
        "weights": _weights(),
        "database": _database(),
        "browser": _browser(),
    }


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The report for a person: one line a finding, `!!` where something can be mended."""
    yield f"ok  qevict {report['qevict']}, Python {report['python']}, {report['system']}"
    missing = [name for name, version in report["packages"].items() if version is None]
    yield _mark(not missing) + ", ".join(f"{name} {version}" for name, version in report["packages"].items() if version)
    for name in missing:
        yield f"!!  {name} is missing: run pip install {name}"
    memory = report["memory"]
    yield f"ok  memory {_size(memory['free_bytes'])} free of {_size(memory['total_bytes'])}, {report['cores']} cores"
    yield f"ok  vector sets: {' '.join(report['isa']) or 'none known'}; devices: {', '.join(report['devices'])}"
    for name in ("model", "weights", "kernel", "database", "browser"):
        finding = report[name]
        yield f"{_mark(finding['ok'])}{name}: {finding['note']}"
    for name, finding in report["backends"].items():
        yield f"{_mark(finding['ok'])}backend {name}: {finding['note']}"


def cached_models() -> dict[str, int]:
    """Bytes on disk of every model that is here and can be loaded without a network, by name."""
    found: dict[str, int] = {}
    source = embedded.packaged_file()
    if source is not None:
        folder = embedded.converted_folder(source)
        weights = folder / "model.safetensors"
        found["embedded"] = (weights if weights.is_file() else source).stat().st_size
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return found
    for repo in cache.repos:
        if repo.repo_type == "model":
            found[repo.repo_id] = repo.size_on_disk
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    try:
        import torch
    except ImportError:
        return []
    found = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]


def _embedded_model() -> dict[str, Any]:
    source = embedded.packaged_file()
    if source is None:
        return _finding(False, f"the embedded model is not installed: run {embedded.INSTALL}")
    folder = embedded.converted_folder(source)
    if embedded.is_whole(folder):
        return _finding(True, f"{embedded.LABEL}, converted in {folder}")
    return _finding(True, f"{embedded.LABEL}, will be converted to {folder} at first use (about 15 seconds, 610 MB)")


def _backends() -> dict[str, dict[str, Any]]:
    """Asks each backend whether it runs on the best device; a broken import is a finding, not a crash."""
    try:
        from engine.attention import unavailable
        from engine.models import choose_device

        device = choose_device("auto")
        reasons = {name: unavailable(name, device) for name in BACKENDS if name != "auto"}
    except ImportError as error:
        return {"all": _finding(False, f"cannot be asked ({error})")}
    return {
        name: _finding(reason is None, f"runs here on {device}" if reason is None else reason)
        for name, reason in reasons.items()
    }


def _kernel() -> dict[str, Any]:
    found = sorted(path.name for path in _engine_folder().rglob("*.so"))
    if found:
        return _finding(True, f"compiled ({', '.join(found)})")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    hint = "run pip install -e . again" if compiler else "install a C compiler (gcc or clang), then pip install -e ."
    return _finding(False, f"not compiled, slower paths are used: {hint}")


def _weights() -> dict[str, Any]:
    """Which form of the embedded model's weights this machine takes, as measured when it was first loaded."""
    try:
        from engine.weights import weights_report
    except ImportError as error:
        return _finding(False, f"cannot be asked ({error})")
    report = weights_report()
    if not report["measured"]:
        return _finding(True, "the fastest form is measured when the embedded model is first loaded") | {
            "report": report
        }
    parts = []
    for record in report["measured"]:
        plan, errors = record["plan"], record.get("error", {})
        worst = max((float(part["relative"]) for part in errors.values()), default=0.0)
        parts.append(
            f"asked {record['asked']}: {plan['few']} for single tokens, {plan['many']} for prompts, "
            f"{plan['head']} for the output layer, relative logit error {worst:.4f} "
            f"over {record.get('tokens', 0)} tokens"
        )
    return _finding(True, "; ".join(parts)) | {"report": report}


def _engine_folder() -> Path:
    return Path(embedded.__file__).resolve().parent


def _database() -> dict[str, Any]:
    from app.settings import Settings

    try:
        path = Settings.from_env().database
    except EngineError as error:
        return _finding(False, str(error))
    place = path if path.exists() else next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_file() and not _is_readable(path):
        return _finding(False, f"{path} is damaged: run qevict doctor --fix-database")
    if os.access(place, os.W_OK):
        return _finding(True, f"{path} can be written")
    return _finding(False, f"{path} cannot be written: set QEVICT_DATA_DIR to a folder that can")


def _is_readable(path: Path) -> bool:
    """Whether SQLite finds the file in order; only looks at it."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            return bool(connection.execute("pragma quick_check").fetchone()[0] == "ok")
    except sqlite3.Error:
        return False


def _browser() -> dict[str, Any]:
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        return _finding(False, "no Chromium for the browser tests: apt-get install chromium (only tests need it)")
    if importlib.util.find_spec("playwright") is None:
        return _finding(False, f'{path}, but playwright is missing: {sys.executable} -m pip install -e ".[dev]"')
    return _finding(True, f"{path}, for the browser tests")


def _finding(ok: bool, note: str) -> dict[str, Any]:
    return {"ok": ok, "note": note}


def _mark(ok: bool) -> str:
    return "ok  " if ok else "!!  "


def _size(size: int | None) -> str:
    return "?" if size is None else f"{size / 2**30:.1f} GiB"
