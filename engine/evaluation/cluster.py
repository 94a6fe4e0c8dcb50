"""A sweep's parts on Ray: workers load the model themselves, run parts, and hand rows back.

    with connected("auto") as ray:
        run_sweep(loaded, suite, store, runner=ray_runner(ray, ModelSource("embedded"), suite))

Ray schedules, restarts what a lost worker was running, and nothing here does it a second time. The one that calls
writes the store. Ray is the extra `cluster` and is imported only here, when asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from engine.errors import BackendError, ConfigError, EngineError
from engine.evaluation.cells import Cell, Part, Suite, cells_of, run_part
from engine.evaluation.sweep import Runner
from engine.models import LoadedModel, load_model

RETRIES: Final = 3
"""Times that Ray begins a part again after the worker that ran it was lost."""
STORE_BYTES: Final = 100_000_000
"""Ray's shared memory on a cluster that is started here: only token ids and rows travel."""
REACH_SECONDS: Final = 5.0
_HELD: dict[Any, LoadedModel] = {}
"""A worker's model, loaded with its first part."""

Load = Callable[[], LoadedModel]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """How every worker loads the model: as `load_model` is asked here."""

    name: str
    device: str = "auto"
    weights: str = "float32"

    def __call__(self) -> LoadedModel:
        return load_model(self.name, device=self.device, weights=self.weights)


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """The ray module, connected while the block runs; what Ray started for it ends with it.

    Args:
        address: "auto" takes a cluster that runs already (RAY_ADDRESS, or one on this machine), else one is started
            on this machine alone. Any other is that of a cluster, such as "10.0.0.1:6379" or "ray://10.0.0.1:10001".

    Raises:
        BackendError: Ray is not installed. ConfigError: no cluster answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise BackendError('--ray needs Ray, which is not installed: pip install "qevict-lab[cluster]".') from error
    if ray.is_initialized():
        yield ray
        return
    if address != "auto":
        _reach(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        if address != "auto" or not isinstance(error, ConnectionError):
            said = str(error).strip().partition("\n")[0]
            raise ConfigError(f"--ray: no Ray cluster answers at {address!r} ({said}).") from error
        start_here(ray)
    try:
        yield ray
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Refuses an address where nothing listens; Ray itself would try for minutes.

    Raises:
        ConfigError: see above.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--ray must be auto, HOST:PORT or ray://HOST:PORT, got {address!r}.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--ray: nothing answers at {address!r} ({error}).") from error


def start_here(ray: Any, **settings: Any) -> None:
    """Starts a cluster on this machine alone, that nothing else can reach; `settings` are those of `ray.init`.

    Raises:
        BackendError: it does not start.
    """
    settings = {
        "include_dashboard": False,
        "object_store_memory": STORE_BYTES,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "_node_ip_address": "127.0.0.1",
        **settings,
    }
    for last in (False, True):
        try:
            ray.init(**settings)
            return
        except Exception as error:  # Ray raises no narrower one where a busy machine lets its start run out of time.
            ray.shutdown()
            if last:
                said = str(error).strip().partition("\n")[0]
                raise BackendError(f"Ray could not be started on this machine ({said}).") from error


def ray_runner(ray: Any, load: Load, suite: Suite, *, threads: int | None = None, gpu: bool = False) -> Runner:
    """A runner for `run_sweep` that keeps the cluster's free places busy.

    Args:
        load: loads the model, in each worker once; must be importable there.
        threads: CPU threads, and so places, that one part takes; None: one. gpu: each part takes a GPU too.
    """
    cpus = threads or 1
    task = ray.remote(_work).options(num_cpus=cpus, num_gpus=int(gpu), max_retries=RETRIES, retry_exceptions=False)
    settings = ray.put(replace(suite, groups=(), left_out=()))

    def places() -> int:
        there = ray.cluster_resources()
        free = int(there.get("CPU", 1) // cpus)
        return max(1, min(free, int(there.get("GPU", 0))) if gpu else free)

    def run(wanted: Iterator[Part]) -> Iterator[tuple[Part, list[tuple[Cell, Cell]]]]:
        running: dict[Any, Part] = {}
        more = True
        try:
            while more or running:
                while more and len(running) < places():
                    part = next(wanted, None)
                    more = part is not None
                    if part is not None:
                        running[task.remote(load, settings, part, cpus)] = part
                finished, _ = ray.wait(list(running), num_returns=1, timeout=1.0) if running else ([], [])
                for reference in finished:
                    yield running.pop(reference), _rows(ray, reference)
        finally:
            for reference in running:
                ray.cancel(reference, force=True)

    return run


def _rows(ray: Any, reference: Any) -> list[tuple[Cell, Cell]]:
    """What a part gave, or its error as if it had happened here."""
    try:
        found: list[tuple[Cell, Cell]] = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, EngineError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        said = str(error).strip().partition("\n")[0]
        raise BackendError(
            f"a Ray worker was lost more than {RETRIES} times on the same cells ({said}): finished cells are kept, run "
            "the same command again."
        ) from error
    return found


def _work(load: Load, settings: Suite, part: Part, threads: int) -> list[tuple[Cell, Cell]]:
    """Runs one part in a worker.

    Raises:
        ConfigError: this worker would measure something else than what the cells describe.
    """
    torch.set_num_threads(threads)
    if load not in _HELD:
        _HELD[load] = load()
    loaded = _HELD[load]
    own = cells_of(loaded, settings, part.group)
    if any(cell not in own for cell in part.cells):
        keys = ("model", "fingerprint", "dtype", "weights", "device", "versions")
        differ = [key for key in keys if part.cells[0].get(key) != own[0].get(key)]
        raise ConfigError(
            f"a Ray worker has another {', '.join(differ) or 'suite'} than this machine: install the same releases and "
            "model on every machine of the cluster."
        )
    return list(run_part(loaded, settings, part))
