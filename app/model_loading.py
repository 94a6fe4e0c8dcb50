"""Loading a model on request, told in sentences while it goes on.

Knows the loaded models and the texts; knows no page.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from app.messages import STAGES
from app.texts import text
from engine.errors import EngineError
from engine.trace import Progress

if TYPE_CHECKING:
    from app.loaded_models import LoadedModels

PACE_SECONDS = 0.4


def load_sentences(models: LoadedModels, name: str, device: str, lang: str) -> Iterator[tuple[str, bool, bool]]:
    """Loads model `name` in a thread and yields (sentence, is an error, is the last one)."""
    if not name.strip():
        yield text(lang, "model.empty"), True, True
        return
    steps: queue.SimpleQueue[Progress] = queue.SimpleQueue()
    outcome: list[str] = []
    failure: list[str] = []

    def work() -> None:
        began = time.monotonic()
        try:
            loaded = models.get(name.strip(), device, "auto", steps.put)
        except EngineError as error:
            failure.append(str(error))
        else:
            outcome.append(
                text(
                    lang,
                    "model.ready",
                    label=loaded.label,
                    device=" + ".join(loaded.devices) or loaded.device,
                    dtype=loaded.dtype,
                    positions=loaded.max_positions,
                    seconds=f"{time.monotonic() - began:.1f}",
                )
            )

    thread = threading.Thread(target=work, name="qevict-load", daemon=True)
    thread.start()
    yield text(lang, "model.loading", name=name.strip()), False, False
    while thread.is_alive():
        thread.join(PACE_SECONDS)
        newest: Progress | None = None
        while not steps.empty():
            newest = steps.get()
        if newest is not None and thread.is_alive():
            stage = text(lang, STAGES.get(newest.stage, "status.stage_load"))
            yield text(lang, "status.progress", stage=stage, done=newest.done, total=newest.total), False, False
    if failure:
        yield failure[0], True, True
    elif outcome:
        yield outcome[0], False, True
    else:
        yield text(lang, "error.unexpected", run_id="qevict-load"), True, True
