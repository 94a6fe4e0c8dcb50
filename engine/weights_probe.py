"""What the forms of a model's weights cost and change on this machine: measured once, kept in the cache folder.

Two measurements: milliseconds of some of the model's own layers in every form, for one row and for many, and the
error of the logits against float32 over a text of our own. Knows how a record is kept; decides nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine import embedded, host
from engine.weight_forms import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FEW_ROWS = (1, 2, 4, 8, 16, 32)
PROMPT_ROWS = 256
"""Rows of the inputs that forms are timed with."""
REPEATS = 5
_TOO_SLOW = 3.0
"""A form that is not for prompts and this many times slower than the best is not timed with more rows."""
_TEXT_TOKENS = 512
_TEXT_WORK = 4e11
"""Most multiply-adds that the float32 pass of the error measurement may take: a second or two."""
_TEXT_LOGITS = 1 << 25
"""Most logits of the text."""
_COMPARED_TOGETHER = 32

TEXT = (
    "A cache that forgets on purpose must choose what to forget. Every few steps it looks at how often each group of "
    "eight neighbouring tokens was attended to, and sorts the groups onto three shelves: kept exactly, kept in two "
    "bits a number, or dropped. The second shelf is the interesting one, because a group that was put away can come "
    "back when the story returns to it. Imagine a long letter in which a captain describes her ship, the weather off "
    "the northern coast, the quarrels of the crew and, near the end, the name of the harbour where the gold was "
    "hidden. A reader who remembers the last page alone will not find the gold, and a reader who remembers only what "
    "seemed important on the first page will not find it either.\n\n"
    "def running_mean(values):\n    total = 0.0\n    for index, value in enumerate(values, start=1):\n"
    "        total += value\n        yield total / index\n\n"
    "The table of distances reads: Oslo 413, Bergen 7, Trondheim 631, Bodø 1,204 kilometres. In the morning the fog "
    "lifted, and they saw that the island was much smaller than the map had promised. Nobody spoke for a while. Then "
    "the cook laughed, because he had carried forty pounds of flour up the hill for nothing, and the others began to "
    "laugh as well. Photosynthesis turns light, water and carbon dioxide into sugar and oxygen; its first step splits "
    "water. If x squared equals sixteen, then x is four or minus four. The committee met on Tuesday and decided, "
    "after two hours, to meet again on Thursday. What do we owe to people who will live three hundred years from now? "
    "Perhaps only this: that we do not spend what cannot be made again.\n\n"
    "Preheat the oven to 200 degrees, mix the butter with the sugar until it is pale, add three eggs one at a time, "
    "then fold in the flour and a pinch of salt. Bake for thirty-five minutes. The train to Geneva leaves at 9:42 "
    "from platform 7 and arrives at 13:05; whoever misses it takes the next one at 11:42, changes in Lausanne, and "
    "loses an hour. Dear Sir, thank you for your letter of the third. We have looked into the matter and can find no "
    "trace of the parcel, but we shall send another, and we are sorry for the trouble that this has caused you."
)


def machine() -> dict[str, Any]:
    """What a measurement depends on besides the model: processor, instruction sets, torch and its threads."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        found = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
        name = found.group(1).strip() if found else name
    return {
        "processor": name,
        "isa": list(host.isa_flags()),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def records_file() -> Path:
    """Where the records lie, whether there are any or not."""
    return embedded.cache_root() / "weights.json"


def records() -> list[dict[str, Any]]:
    """Every record, of other machines too; none where the file is missing or damaged."""
    try:
        found = json.loads(records_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [record for record in found if isinstance(record, dict)] if isinstance(found, list) else []


def find_record(fingerprint: str, asked: str) -> dict[str, Any] | None:
    """The record of this machine for a model and what was asked for."""
    here = machine()
    wanted = {"machine": here, "fingerprint": fingerprint, "asked": asked}
    return next((r for r in records() if all(r.get(key) == value for key, value in wanted.items())), None)


def keep_record(record: dict[str, Any]) -> None:
    """Keeps a record in place of its predecessor; a folder that cannot be written costs a new measurement."""
    same = ("machine", "fingerprint", "asked")
    rest = [old for old in records() if any(old.get(key) != record[key] for key in same)]
    path = records_file()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump([*rest, record], file, indent=1)
        Path(part).replace(path)


@torch.inference_mode()
def time_forms(
    layers: Mapping[str, Sequence[Rows]], prompt_forms: Collection[str], in_features: int
) -> dict[str, dict[int, float]]:
    """CPU milliseconds per layer of each form, by rows; forms take turns, medians.

    Args:
        layers: by form, the same few layers. More than one, so that weights come from beyond the nearest cache.
        prompt_forms: forms to time with a prompt's rows as well.
    """
    spent: dict[str, dict[int, float]] = {form: {} for form in layers}
    running = list(layers)
    for rows in (*FEW_ROWS, PROMPT_ROWS):
        if rows == PROMPT_ROWS:
            running = [form for form in layers if form in prompt_forms]
        x = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows))
        took: dict[str, list[float]] = {form: [] for form in running}
        for turn in range(REPEATS + 1):
            for form in running:
                began = time.thread_time()
                for layer in layers[form]:
                    layer(x)
                # The first turn pays for allocations and for what the libraries prepare.
                if turn:
                    took[form].append(time.thread_time() - began)
        for form in running:
            spent[form][rows] = median(took[form]) * 1e3 / len(layers[form])
        best = min(spent[form][rows] for form in running)
        running = [form for form in running if form in prompt_forms or spent[form][rows] <= _TOO_SLOW * best]
    return spent


def text_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Our text for this model, [1, tokens]: shorter where the model is large, so that the pass stays short."""
    weights = sum(weight.numel() for weight in model.parameters())
    most = min(_TEXT_TOKENS, max(16, int(_TEXT_WORK / 2 / max(1, weights))))
    most = min(most, max(16, _TEXT_LOGITS // int(model.config.get_text_config(decoder=True).vocab_size)))
    encoded = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    return torch.as_tensor(encoded)[:, :most]


@torch.inference_mode()
def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """[tokens, vocabulary], without a cache."""
    out: Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
    return out


def compare(ours: Tensor, exact: Tensor) -> dict[str, float]:
    """How far logits [tokens, vocabulary] are from the float32 model's.

    Returns:
        relative: Frobenius norm of the difference over that of the logits. top1: share of places with the same
        likeliest token. kl: mean Kullback-Leibler divergence in nats.
    """
    difference = norm = same = divergence = 0.0
    # In parts: a whole text times a vocabulary is a hundred megabytes for each intermediate.
    for mine, right in zip(ours.split(_COMPARED_TOGETHER), exact.split(_COMPARED_TOGETHER), strict=True):
        difference += float((mine - right).square().sum())
        norm += float(right.square().sum())
        same += float((mine.argmax(-1) == right.argmax(-1)).sum())
        log_mine, log_right = mine.log_softmax(-1), right.log_softmax(-1)
        divergence += float((log_right.exp() * (log_right - log_mine)).sum())
    tokens = exact.shape[0]
    return {"relative": (difference / norm) ** 0.5, "top1": same / tokens, "kl": divergence / tokens}
