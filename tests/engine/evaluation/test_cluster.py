"""A sweep on a local Ray cluster of two workers, one of them killed in the middle of a cell."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import QEvictConfig
from engine.errors import BackendError, ConfigError
from engine.evaluation.cells import ItemGroup, PolicyGroup, Suite
from engine.evaluation.cluster import ModelSource, connected, ray_runner, start_here
from engine.evaluation.forcing import System
from engine.evaluation.items import Text, continuations
from engine.evaluation.store import Store
from engine.evaluation.sweep import in_turns, run_sweep
from engine.models import LoadedModel
from tests.engine.evaluation.test_tasks import STORY
from tests.tiny import tiny_loaded

torch.set_num_threads(1)
ROOT = Path(__file__).parents[3]
VICTIM = "victim"


@dataclasses.dataclass(frozen=True)
class Loader:
    """Loads the tiny model; the first worker that reaches its sixth forward waits in it to be killed."""

    folder: str
    seed: int = 0

    def __call__(self) -> LoadedModel:
        loaded = tiny_loaded(positions=2048, seed=self.seed)
        Path(self.folder, f"worker-{os.getpid()}").touch()
        forwards = 0

        def wait(*_: Any) -> None:
            nonlocal forwards
            forwards += 1
            if forwards != 6 or self.seed:
                return
            try:
                handle = os.open(Path(self.folder, VICTIM), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                return
            os.write(handle, str(os.getpid()).encode())
            os.close(handle)
            time.sleep(120)
            raise RuntimeError("nobody killed this worker")

        loaded.model.register_forward_pre_hook(wait)
        return loaded


def suite() -> Suite:
    tokenizer = tiny_loaded(positions=2048).tokenizer
    texts = [Text("ferry", STORY)]
    systems = (System("fullkv"), System("qevict", 0.3), System("h2o", 0.3), System("qevict", 0.02))
    items = [ItemGroup(item, systems) for item in continuations(tokenizer, texts, 200, 12, 4)]
    policies = [
        PolicyGroup(item, (0.4, 0.3), QEvictConfig(window_size=4))
        for item in continuations(tokenizer, texts, 300, 40, 1)
    ]
    return Suite("small", in_turns(items, policies))


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Two places on this machine, nothing listening beyond it."""
    found = pytest.importorskip("ray", reason="the extra `cluster` is not installed: Ray is missing")
    if found.is_initialized():
        pytest.skip("another Ray session is connected")
    # Short, for Ray puts sockets below it.
    folder = tempfile.mkdtemp(prefix="qev")
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_AUTH_TOKEN", uuid.uuid4().hex)
    # Workers give way to everything else by default: on a busy machine they would never come to their turn.
    patch.setenv("RAY_worker_niceness", "0")
    patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    try:
        start_here(found, num_cpus=2, num_gpus=0, _temp_dir=folder)
        yield found
    finally:
        found.shutdown()
        patch.undo()
        shutil.rmtree(folder, ignore_errors=True)


def killer(folder: Path, rows: Path, killed: list[int]) -> None:
    """Kills the worker that waits in the middle of a cell, after another one has finished a part, or soon anyway."""
    name, end = folder / VICTIM, time.monotonic() + 150
    while time.monotonic() < end and not (name.exists() and name.read_text()):
        time.sleep(0.05)
    soon = time.monotonic() + 30
    while time.monotonic() < soon and not rows.exists():
        time.sleep(0.05)
    killed.append(int(name.read_text()))
    os.kill(killed[0], signal.SIGKILL)


@pytest.mark.timeout(280)
def test_a_killed_worker_costs_no_cell_and_doubles_none(ray: Any, tmp_path: Path) -> None:
    path, killed = tmp_path / "cells.jsonl", list[int]()
    watcher = threading.Thread(target=killer, args=(tmp_path, path, killed))
    watcher.start()
    with connected("auto") as session:
        runner = ray_runner(session, Loader(str(tmp_path)), suite())
        result = run_sweep(tiny_loaded(positions=2048), suite(), Store(path), runner=runner)
    watcher.join()
    assert killed and ray.is_initialized()
    assert result.missing == 0 and result.ran == 18
    keys = [json.loads(line)["key"] for line in path.read_text().splitlines()]
    assert len(keys) == len(set(keys)) == 18
    workers = {int(name.name.removeprefix("worker-")) for name in tmp_path.glob("worker-*")}
    assert len(workers) >= 2 and killed[0] in workers and os.getpid() not in workers
    alone = run_sweep(tiny_loaded(positions=2048), suite(), Store(None))
    assert [plain(row) for row in result.rows] == [plain(row) for row in alone.rows]
    again = run_sweep(tiny_loaded(positions=2048), suite(), Store(path), runner=runner)
    assert again.ran == 0 and again.rows == result.rows


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what differs from run to run."""
    return {key: value for key, value in row.items() if key != "ms_per_token"}


@pytest.mark.timeout(200)
def test_a_worker_with_another_model_is_refused(ray: Any, tmp_path: Path) -> None:
    store = Store(None)
    with connected("auto") as session, pytest.raises(ConfigError, match="another fingerprint"):
        run_sweep(
            tiny_loaded(positions=2048), suite(), store, runner=ray_runner(session, Loader(str(tmp_path), 1), suite())
        )
    assert len(store) == 0


def test_without_ray_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BackendError, match=r"qevict-lab\[cluster\]"), connected("auto"):
        pass


@pytest.mark.parametrize(
    ("address", "said"), [("127.0.0.1:1", "nothing answers"), ("nonsense", "HOST:PORT"), ("host:99999x", "HOST:PORT")]
)
def test_a_wrong_address_is_said_at_once(address: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    with pytest.raises(ConfigError, match=said), connected(address):
        pass


def test_a_source_loads_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("engine.evaluation.cluster.load_model", lambda name, **more: asked.append((name, more)))
    ModelSource("embedded", "cpu", "int4")()
    assert asked == [("embedded", {"device": "cpu", "weights": "int4"})]
    assert hash(ModelSource("a")) == hash(ModelSource("a"))
