"""LongBench's twelve English tasks and GSM8K from files of the user's: prompts, cuts and metrics as published.

LongBench: a folder with `<task>.jsonl` (context, input, answers, all_classes) and its `dataset2prompt.json`, whose
templates are used as they stand. GSM8K: JSON lines of question and answer, five solved ones in front. No data and
no template of either is part of this package. Knows tokenizers, no model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.errors import ConfigError, PromptError
from engine.evaluation.items import encode
from engine.evaluation.sample import Sample


@dataclass(frozen=True, slots=True)
class LongTask:
    """One LongBench task: most new tokens, metric, and whether it is few-shot (no chat template, first line only)."""

    new_tokens: int
    metric: str
    few_shot: bool = False
    stop: tuple[str, ...] = ()


LONGBENCH: Final[dict[str, LongTask]] = {
    "narrativeqa": LongTask(128, "f1"),
    "qasper": LongTask(128, "f1"),
    "multifieldqa_en": LongTask(64, "f1"),
    "hotpotqa": LongTask(32, "f1"),
    "2wikimqa": LongTask(32, "f1"),
    "musique": LongTask(32, "f1"),
    "gov_report": LongTask(512, "rouge_l"),
    "qmsum": LongTask(512, "rouge_l"),
    "multi_news": LongTask(512, "rouge_l"),
    "trec": LongTask(64, "label", True),
    "triviaqa": LongTask(32, "f1", True),
    "samsum": LongTask(128, "rouge_l", True, ("\n",)),
}
SHOTS: Final = 5
GSM8K_TOKENS: Final = 512
_PROMPTS = ("dataset2prompt.json", "longbench_dataset2prompt.json", "ref/longbench_dataset2prompt.json")


def cut_middle(ids: Sequence[int], limit: int) -> list[int]:
    """At most `limit` ids: the first half and the last half."""
    if len(ids) <= limit:
        return list(ids)
    half = limit // 2
    return [*ids[:half], *ids[len(ids) - (limit - half) :]]


def longbench_samples(
    name: str, tokenizer: Any, folder: Path, *, length: int, count: int, question: str = "inside", chat: bool = True
) -> list[Sample]:
    """The first `count` samples of one task, cut in the middle to `length` tokens.

    Args:
        question: "inside" is the benchmark's own way; "after" compresses everything but the last 32 tokens first,
            which hold the end of the template and most of the question.

    Raises:
        ConfigError: an unknown task. PromptError: files that are not there or not of this form.
    """
    if name not in LONGBENCH:
        raise ConfigError(f"a LongBench task must be one of {', '.join(LONGBENCH)}, got {name!r}.")
    task = LONGBENCH[name]
    template = _templates(folder)[name]
    out = []
    for index, entry in enumerate(_lines(folder / f"{name}.jsonl")[:count]):
        try:
            text = template.format(**entry)
            references, classes = list(entry["answers"]), list(entry.get("all_classes") or [])
        except (KeyError, IndexError, TypeError) as error:
            raise PromptError(f"{name}.jsonl, line {index + 1} does not fit its template ({error!r}).") from error
        ids = cut_middle(encode(tokenizer, text, begin=True), length)
        if chat and not task.few_shot and tokenizer.chat_template:
            message = [{"role": "user", "content": tokenizer.decode(ids, skip_special_tokens=True)}]
            ids = encode(tokenizer, tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
        out.append(
            Sample(
                name,
                index,
                length,
                tuple(ids[:-32]),
                tuple(ids[-32:]),
                tuple(references),
                task.new_tokens,
                task.metric,
                tuple(classes),
                task.few_shot,
                task.stop,
                question,
                str(entry.get("_id", "")),
            )
        )
    return out


def gsm8k_samples(tokenizer: Any, path: Path, *, count: int, shots: Path | None = None) -> list[Sample]:
    """Questions with five solved ones in front, from `shots` or else from the file's own first lines.

    Raises:
        PromptError: a file that is not there or not of this form.
    """
    rows = _lines(path)
    solved = _lines(shots)[:SHOTS] if shots else rows[:SHOTS]
    asked = rows if shots else rows[SHOTS:]
    try:
        head = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in solved)
        return [
            Sample(
                "gsm8k",
                index,
                0,
                tuple(encode(tokenizer, head, begin=True)),
                tuple(encode(tokenizer, f"Question: {row['question']}\nAnswer:")),
                (row["answer"],),
                GSM8K_TOKENS,
                "gsm8k",
                stop=("Question:",),
                question="inside",
            )
            for index, row in enumerate(asked[:count])
        ]
    except KeyError as error:
        raise PromptError(f"{path} must hold question and answer in every line; {error} is missing.") from error


def _templates(folder: Path) -> dict[str, str]:
    for name in _PROMPTS:
        if (folder / name).is_file():
            try:
                found = json.loads((folder / name).read_text("utf-8"))
            except ValueError as error:
                raise PromptError(f"{folder / name} is no JSON ({error}).") from error
            return {str(key): str(value) for key, value in found.items()}
    raise PromptError(f"{folder} has no {_PROMPTS[0]}: it comes with LongBench and holds the templates of its prompts.")


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise PromptError(f"cannot read {path} ({error.strerror or error}).") from error
    except ValueError as error:
        raise PromptError(f"{path} must hold one JSON object a line ({error}).") from error
