"""What `qevict eval` is about to do, and how far it is: the plan before a run, the progress while it runs.

Knows suites and stores; runs no cell.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

STEPS = 12
"""Decode steps that are timed for a plan."""
EVERY_SECONDS = 60.0
"""Between two lines where stderr is no terminal."""


def plan(loaded: Any, suite: Any, store: Any) -> dict[str, Any]:
    """Cells per task, what is finished, and the time that the rest would take at the pace of a few steps timed now."""
    from engine.evaluation.cells import PolicyGroup, cells_of, parts_of
    from engine.evaluation.store import cell_key

    tasks: dict[tuple[Any, ...], dict[str, Any]] = {}
    work = 0.0
    for group in suite.groups:
        simulated = isinstance(group, PolicyGroup)
        item = group.item
        line = tasks.setdefault(
            (simulated, item.task, item.length),
            {
                "task": "policies" if simulated else item.task,
                "length": item.length,
                "items": 0,
                "systems": [],
                "cells": 0,
                "finished": 0,
            },
        )
        cells = cells_of(loaded, suite, group)
        todo = [cell for cell in cells if cell_key(cell) not in store]
        work += sum(part.cost for part in parts_of(loaded, group, todo))
        line["items"] += 1
        line["cells"] += len(cells)
        line["finished"] += len(cells) - len(todo)
        names = [f"budget {share:.0%}" for share in group.shares] if simulated else [s.label for s in group.systems]
        line["systems"] += [name for name in names if name not in line["systems"]]
    lines = list(tasks.values())
    pace = _step_seconds(loaded)
    return {
        "suite": suite.name,
        "tasks": lines,
        "cells": sum(line["cells"] for line in lines),
        "finished": sum(line["finished"] for line in lines),
        "steps_left": round(work),
        "ms_per_step": pace * 1e3,
        "minutes_left": work * pace / 60,
        "left_out": list(suite.left_out),
    }


def plan_lines(found: dict[str, Any]) -> list[str]:
    """A plan for a person."""
    out = [f"{found['suite']}: {found['cells']} cells, {found['finished']} of them finished"]
    said: dict[tuple[str, ...], str] = {}
    for line in found["tasks"]:
        systems = tuple(line["systems"])
        out.append(
            f"  {line['task']:<16}{line['length']:>6} tokens, {line['items']:>3} items, {line['cells']:>5} cells"
            + (f", {line['finished']} finished" if line["finished"] else "")
        )
        out.append(f"    the systems of {said[systems]}" if systems in said else f"    {', '.join(systems)}")
        said.setdefault(systems, line["task"])
    out.append(
        f"About {found['minutes_left']:.0f} min if the machine stays as it is: work of {found['steps_left']} decode "
        f"steps, at {found['ms_per_step']:.1f} ms each, the median of {STEPS} that were timed now."
    )
    return out + [f"Left out: {line}" for line in found["left_out"]]


def _step_seconds(loaded: Any) -> float:
    """Median decode step after a short prompt, with the model's own cache."""
    import torch
    from transformers import DynamicCache

    from engine.adapter import cache_keyword

    model, times = loaded.model, []
    cache = {cache_keyword(model): DynamicCache(config=model.config)}
    with torch.inference_mode():
        ids = torch.zeros(1, 64, dtype=torch.long, device=model.device)
        model(input_ids=ids, use_cache=True, **cache)
        for _ in range(STEPS):
            began = time.perf_counter()
            out = model(input_ids=ids[:, :1], use_cache=True, **cache)
            float(out.logits[0, -1, 0])
            times.append(time.perf_counter() - began)
    return statistics.median(times)


class Bar:
    """A progress bar on stderr with the time left; where stderr is no terminal, a line a minute."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._lines = not sys.stderr.isatty()
        self._said = time.monotonic()
        self._bar = tqdm(
            total=1,
            file=sys.stderr,
            leave=False,
            disable=self._lines,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} {postfix}",
        )

    def show(self, state: Any) -> None:
        """Moves the bar."""
        left = "" if state.left is None else f"about {state.left / 60:.1f} min left"
        if self._lines:
            if time.monotonic() - self._said >= EVERY_SECONDS:
                self._said = time.monotonic()
                print(
                    f"{state.done} of {state.total} cells, {left or 'time left unknown'}", file=sys.stderr, flush=True
                )
            return
        self._bar.total = max(1, state.total)
        self._bar.n = state.done
        self._bar.set_postfix_str(f"{state.now}  {left}".strip())

    def close(self) -> None:
        """Takes the bar away."""
        self._bar.close()
