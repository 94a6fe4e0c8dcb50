"""What is measured together: the quick table of a newcomer, the full set, and one ablation at a time.

Builds items and names systems; runs nothing. Knows tokenizers through a loaded model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from engine.config import QEvictConfig
from engine.errors import ConfigError
from engine.evaluation.benchmarks import LONGBENCH, gsm8k_samples, longbench_samples
from engine.evaluation.cells import AnswerGroup, Group, ItemGroup, PolicyGroup, Suite
from engine.evaluation.forcing import FULL, System
from engine.evaluation.items import Item, Text, continuations
from engine.evaluation.ruler import RULER, ruler_samples
from engine.evaluation.ruler import SEED as RULER_SEED
from engine.evaluation.sweep import in_turns
from engine.evaluation.tasks import make_items
from engine.models import LoadedModel

PUBLISHED: Final = (*RULER, *LONGBENCH, "gsm8k")
"""Tasks that are answered in free words."""
BUDGETS: Final = (0.20, 0.10, 0.05)
QUICK: Final = (
    System(FULL),
    System("qevict", 0.20),
    System("qevict", 0.10),
    System("qevict", 0.05),
    System("qevict-r1", 0.20),
    System("qevict-r2", 0.20),
    System("qevict-decayed", 0.20),
    System("qevict-recent", 0.20),
    System("streamingllm", 0.20),
    System("snapkv", 0.20),
    System("h2o", 0.20),
    System("kivi-2"),
)
MATCHED: Final = (
    "qevict",
    "qevict-r1",
    "qevict-r2",
    "qevict-int4",
    "qevict-decayed",
    "qevict-recent",
    "streamingllm",
    "snapkv",
    "adakv",
    "layer-defensivekv",
    "h2o",
)
AT_TWENTY: Final = ("qevict-r4", "qevict-no-promotion", "zipcache", "random")
OWN_POINT: Final = ("kivi-2", "kivi-4")
"""Quantizers run at an operating point of their own; QEvict is matched to the bytes of each."""
ABLATIONS: Final[dict[str, tuple[str, tuple[Any, ...], Any]]] = {
    "window": ("window_size", (4, 8, 16, 32), 8),
    "q": ("quant_share", (0.1, 0.3, 0.5, 0.7, 0.9), 0.7),
    "bits": ("bits", (2, 4), 2),
    "promotion": ("promotion", (True, False), True),
    "budget": ("", (0.05, 0.10, 0.20, 0.30, 0.40), 0.20),
    "ranker": ("ranker", ("cumulative", "decayed", "p_norm", "key_norm"), "cumulative"),
    "scope": ("score_scope", ("layer", "kv_head"), "layer"),
}
"""Parameter, values, and the article's choice."""


def quick(loaded: LoadedModel, texts: Sequence[Text], *, seed: int = 0, kv_dtype: str = "float16") -> Suite:
    """A fair first table in about ten minutes on two quiet cores; a time limit is the caller's."""
    tokenizer = loaded.tokenizer
    books = continuations(tokenizer, texts, 768, 33, 10)
    traces = continuations(tokenizer, texts, 768, 96, 8)
    groups = in_turns(
        [ItemGroup(item, QUICK) for item in books],
        _task(loaded, texts, "niah1_raw", 640, 20, QUICK, seed),
        _task(loaded, texts, "kvline", 640, 20, QUICK, seed),
        _task(loaded, texts, "copy_passage", 640, 5, QUICK, seed),
        [PolicyGroup(item, (0.20,), QEvictConfig(kv_dtype=kv_dtype)) for item in traces],
    )
    left_out = [
        "budgets of 5 and 10 % for the rivals; quotation, labels and drift; contexts above 768 tokens: see eval full",
        "AdaKV, CriticalKV, DefensiveKV, LayerDefensiveKV, ZipCache, KVQuant, KIVI-4: see eval full, or qevict compare",
        "RULER, LongBench and GSM8K: a 135M model is at their floor",
        "speed: see qevict bench",
    ]
    if len(books) < 10:
        left_out.append(f"10 texts were wanted, {len(books)} are there: name a folder with --data")
    return Suite("quick", groups, tuple(left_out), kv_dtype, seed)


def full(loaded: LoadedModel, texts: Sequence[Text], *, seed: int = 0, kv_dtype: str = "float16") -> Suite:
    """Every task at every budget, 20 items each, and 20 texts for the directions of the article."""
    matched = tuple(System(name, share) for share in BUDGETS for name in MATCHED)
    beside = tuple(s for name in OWN_POINT for s in (System(name), System("qevict", match_to=name)))
    systems = (System(FULL), *matched, *beside)
    at_twenty = (*systems, *(System(name, 0.20) for name in AT_TWENTY))
    books = continuations(loaded.tokenizer, texts, 1024, 65, 20)
    traces = continuations(loaded.tokenizer, texts, 1024, 128, 20)
    groups = in_turns(
        [ItemGroup(item, at_twenty) for item in books],
        _task(loaded, texts, "niah1_raw", 1024, 20, systems, seed),
        _task(loaded, texts, "kvline", 1024, 20, systems, seed),
        _task(loaded, texts, "copy_passage", 1024, 20, systems, seed),
        _task(loaded, texts, "quote_as", 1024, 20, systems, seed),
        _task(loaded, texts, "icl_label5", 1024, 20, systems, seed),
        _task(loaded, texts, "drift", 1024, 20, tuple(s for s in systems if s.share in (None, 0.20)), seed),
        [PolicyGroup(item, BUDGETS, QEvictConfig(kv_dtype=kv_dtype)) for item in traces],
    )
    left_out = ["drift at 10 and 5 %", "contexts above 1,024 tokens", "LongBench and GSM8K: below this model's reach"]
    if len(traces) < 20:
        left_out.append(f"20 texts were wanted, {len(traces)} are there: name a folder with --data")
    return Suite("full", groups, tuple(left_out), kv_dtype, seed)


def directions(loaded: LoadedModel, texts: Sequence[Text], *, seed: int = 0, kv_dtype: str = "float16") -> Suite:
    """Policies on the traces of 20 texts at three budgets: the article's directions with intervals, in minutes."""
    traces = continuations(loaded.tokenizer, texts, 1024, 128, 20)
    groups: list[Group] = [PolicyGroup(item, BUDGETS, QEvictConfig(kv_dtype=kv_dtype)) for item in traces]
    left_out = [
        "everything that needs a real cache: quality, KL, attention-output error, bytes, the feedback of quantization "
        "on scores: see eval quick and full"
    ]
    if len(traces) < 20:
        left_out.append(f"20 texts were wanted, {len(traces)} are there: name a folder with --data")
    return Suite("directions", tuple(groups), tuple(left_out), kv_dtype, seed)


def ablation(
    loaded: LoadedModel,
    texts: Sequence[Text],
    what: str,
    *,
    share: float = 0.20,
    length: int = 1024,
    count: int = 20,
    task: str = "book",
    seed: int = 0,
    kv_dtype: str = "float16",
) -> Suite:
    """One setting of QEvict over its range, all else as the default.

    Raises:
        ConfigError: an unknown setting or task.
    """
    if what not in ABLATIONS:
        raise ConfigError(f"--what must be one of {', '.join(ABLATIONS)}, got {what!r}.")
    name, values, _ = ABLATIONS[what]
    if name:
        tried = tuple(System("qevict", share, {name: value}) for value in values)
    else:
        tried = tuple(System("qevict", float(value)) for value in values)
    systems = (System(FULL), *tried)
    groups: Sequence[Group]
    if task == "book":
        items = continuations(loaded.tokenizer, texts, length, 65, count)
        groups = [ItemGroup(item, systems) for item in items]
    else:
        groups = _task(loaded, texts, task, length, count, systems, seed)
    left_out = [] if len(groups) >= count else [f"{count} items were wanted, {len(groups)} are there"]
    return Suite(f"ablation-{what}", tuple(groups), tuple(left_out), kv_dtype, seed)


def one_task(
    loaded: LoadedModel,
    texts: Sequence[Text],
    task: str,
    systems: Sequence[System],
    *,
    length: int,
    count: int,
    question: str = "after",
    seed: int = 0,
    kv_dtype: str = "float16",
) -> Suite:
    """One task, or "book" for fidelity on running text, with FullKV first."""
    chosen = tuple(systems) if any(system.name == FULL for system in systems) else (System(FULL), *systems)
    groups: Sequence[Group]
    if task == "book":
        groups = [ItemGroup(item, chosen) for item in continuations(loaded.tokenizer, texts, length, 65, count)]
    else:
        groups = _task(loaded, texts, task, length, count, chosen, seed, question)
    left_out = [] if len(groups) >= count else [f"{count} items were wanted, {len(groups)} are there"]
    return Suite(task, tuple(groups), tuple(left_out), kv_dtype, seed)


def benchmark(
    loaded: LoadedModel,
    texts: Sequence[Text],
    task: str,
    systems: Sequence[System],
    *,
    length: int,
    count: int,
    question: str = "after",
    data: Path | None = None,
    seed: int = 0,
    kv_dtype: str = "float16",
) -> Suite:
    """One task of RULER, LongBench or GSM8K, answered in free words; `data` is a file or folder of the user's.

    Raises:
        ConfigError: an unknown task, or data that it needs is not named. PromptError: data of another form.
    """
    if task in RULER:
        samples = ruler_samples(
            task,
            loaded.tokenizer,
            texts,
            length=length,
            count=count,
            seed=RULER_SEED + seed,
            question=question,
            data=data,
        )
    elif data is None:
        raise ConfigError(f"{task} needs its data: name the file or folder with --benchmark-data.")
    elif task in LONGBENCH:
        samples = longbench_samples(task, loaded.tokenizer, data, length=length, count=count, question=question)
    else:
        shots = data.with_name("gsm8k_train.jsonl")
        found = shots if shots.is_file() and shots != data else None
        samples = gsm8k_samples(loaded.tokenizer, data, count=count, shots=found)
    chosen = tuple(systems) if any(system.name == FULL for system in systems) else (System(FULL), *systems)
    left_out = [] if len(samples) >= count else [f"{count} items were wanted, {len(samples)} are there"]
    if task == "gsm8k" and data is not None and not data.with_name("gsm8k_train.jsonl").is_file():
        left_out.append("solved examples come from the file's own first lines, which are not scored")
    return Suite(task, tuple(AnswerGroup(sample, chosen) for sample in samples), tuple(left_out), kv_dtype, seed)


def _task(
    loaded: LoadedModel,
    texts: Sequence[Text],
    task: str,
    length: int,
    count: int,
    systems: tuple[System, ...],
    seed: int,
    question: str = "after",
) -> list[Group]:
    items: list[Item] = make_items(
        task, loaded.tokenizer, texts, length=length, count=count, seed=seed, question=question
    )
    return [ItemGroup(item, systems) for item in items]
