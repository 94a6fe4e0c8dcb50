"""`make bench`: what a decoded token costs with QEvict against stock transformers, both in one process.

The two take turns token by token, so that a busy machine slows both alike; medians are compared. Also prints what the
FullKV reference adds. A first figure, not a study: one model, one prompt length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.errors import EngineError
from presets.loader import DEFAULT, load_preset


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints one JSON line; the exit code is 2 for wrong input."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--preset", default=DEFAULT)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args(argv)
    try:
        config = load_preset(arguments.preset).config.replace(
            backend=arguments.backend, planned_new_tokens=arguments.tokens
        )
        report = measure(arguments.model, config, arguments.prompt_tokens, arguments.tokens)
    except EngineError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report))
    return 0


def measure(model_name: str, config: Any, prompt_tokens: int, tokens: int) -> dict[str, Any]:
    """Milliseconds per decoded token of both, their ratio, and the reference's share of a run.

    Args:
        model_name: as `load_model` takes it.
        config: a `QEvictConfig`.
        prompt_tokens, tokens: length of the prompt, and of what is decoded after it.
    """
    import torch
    from transformers import DynamicCache

    from engine.cache import QEvictCache
    from engine.generate import RunOptions, generate
    from engine.models import load_model

    loaded = load_model(model_name)
    ids = torch.randint(5, 1000, (1, prompt_tokens), generator=torch.Generator().manual_seed(0)).to(loaded.device)
    ours = _stepper(loaded.model, QEvictCache(loaded.model, config), ids)
    stock = _stepper(loaded.model, DynamicCache(config=loaded.model.config), ids)
    times: dict[str, list[float]] = {"ours": [], "stock": []}
    for _ in range(tokens):
        for name, step in (("ours", ours), ("stock", stock)):
            began = time.perf_counter()
            step()
            times[name].append((time.perf_counter() - began) * 1e3)
    text = loaded.tokenizer.decode(ids[0, : prompt_tokens // 2])
    events = list(generate(loaded, text, config, RunOptions(max_new_tokens=tokens, chat=False, ignore_eos=True)))
    summary: dict[str, Any] = getattr(events[-1], "summary", {})
    # Means, not medians, stand for QEvict's whole cost: one step in every window routes.
    mean = {name: statistics.fmean(values) for name, values in times.items()}
    return {
        "model": loaded.label,
        "prompt_tokens": prompt_tokens,
        "tokens": tokens,
        "threads": torch.get_num_threads(),
        "backend": summary.get("backend"),
        "ours_ms": round(mean["ours"], 2),
        "stock_ms": round(mean["stock"], 2),
        "ratio_of_means": round(mean["ours"] / mean["stock"], 3),
        "ratio_of_medians": round(statistics.median(times["ours"]) / statistics.median(times["stock"]), 3),
        "reference_share": round(summary["timing"]["reference_share"], 3),
        "reference_context": summary["timing"]["prompt_tokens"],
    }


def _stepper(model: Any, cache: Any, ids: Any) -> Callable[[], None]:
    """Reads the prompt and returns a function that decodes one more token, greedily."""
    import torch

    from engine.adapter import cache_keyword

    keyword = {cache_keyword(model): cache}
    at = ids.shape[1]
    with torch.inference_mode():
        token = model(input_ids=ids, use_cache=True, logits_to_keep=1, **keyword).logits[:, -1:].argmax(-1)

    def step() -> None:
        nonlocal token, at
        with torch.inference_mode():
            place = torch.tensor([[at]], device=ids.device)
            output = model(input_ids=token, position_ids=place, use_cache=True, **keyword)
            token = output.logits[:, -1:].argmax(-1)
        at += 1

    return step


if __name__ == "__main__":
    sys.exit(main())
