"""Seeded tasks that a small model can do: needles, key-value lines, copying, quoting, labels, drift.

    items = make_items("kvline", tokenizer, texts, length=512, count=20)

Item i of a task depends on the seed, i, the length and the texts alone. Knows tokenizers; knows no model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine.errors import ConfigError
from engine.evaluation.items import MAIN, Item, Span, Text, encode, sentences
from engine.evaluation.words import CATEGORIES, CITIES, LABELS, WORDS

QUESTIONS = ("after", "inside")
COPIED = 40
"""Tokens of a passage that are copied."""
QUOTED = 16
STRETCH = 64
"""Tokens between the two askings of drift."""


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """What a table needs to know.

    Attributes:
        score: which figure decides: "exact", "top1" or "choice". chance: what guessing gives.
        line: one sentence.
    """

    name: str
    score: str
    chance: float
    line: str


@dataclass(frozen=True, slots=True)
class _Maker:
    """What a generator works with: one item's own random numbers."""

    tokenizer: Any
    texts: Sequence[Text]
    length: int
    draw: random.Random
    index: int
    question: str

    def ids(self, text: str, *, begin: bool = False) -> list[int]:
        return encode(self.tokenizer, text, begin=begin)

    def haystack(self, tokens: int) -> tuple[list[str], str]:
        """About `tokens` tokens of running text as sentences, from one text, wrapping round at its end."""
        text = self.texts[self.index % len(self.texts)]
        every = sentences(text.text)
        at = self.draw.randrange(len(every))
        chosen: list[str] = []
        used = 0
        while used < tokens:
            sentence = every[at % len(every)]
            at += 1
            used += len(self.ids(" " + sentence))
            chosen.append(sentence)
        return chosen, text.name

    def item(
        self,
        context: list[int],
        question: list[int],
        answer: list[int],
        *,
        choices: tuple[int, ...] = (),
        source: str = "",
        tail: list[int] | None = None,
        spans: dict[str, Span] | None = None,
        **notes: Any,
    ) -> Item:
        """Puts the question after compression or inside the prompt; its last token is always fed alone."""
        inside = self.question == "inside"
        prompt = context + (question[:-1] if inside else [])
        begin = question[-1:] if inside else question
        forced = begin + answer + (tail or [])
        shift = len(question) - len(begin)
        moved = {name: Span(span.begin - shift, span.end - shift) for name, span in (spans or {}).items()}
        main = {MAIN: Span(len(begin), len(begin) + len(answer))}
        return Item(
            "",
            self.index,
            self.length,
            tuple(prompt),
            tuple(forced),
            main | moved,
            choices,
            self.question,
            source,
            notes,
        )


def _needle(make: _Maker) -> Item:
    """One fact in running text."""
    city, number = make.draw.choice(CITIES), f"{make.draw.randrange(100_000):05d}"
    lines, source = make.haystack(make.length - 20)
    depth = make.draw.random()
    lines.insert(round(depth * len(lines)), f"The special magic number for {city} is {number}.")
    question = f"\n\nThe special magic number for {city} is"
    context = make.ids(" ".join(lines), begin=True)
    return make.item(context, make.ids(question), make.ids(f" {number}"), source=source, depth=round(depth, 3))


def _lines(make: _Maker) -> Item:
    """A table of words and numbers, one asked after a blank line (without it, small models do far worse)."""
    words = list(WORDS)
    make.draw.shuffle(words)
    rows: list[tuple[str, str]] = []
    context: list[int] = make.ids("", begin=True)
    for word in words:
        row = (word, f"{make.draw.randrange(100_000):05d}")
        line = make.ids(f"{row[0]}: {row[1]}\n")
        if len(context) + len(line) > make.length:
            break
        rows.append(row)
        context += line
    asked = make.draw.randrange(len(rows))
    word, number = rows[asked]
    return make.item(
        context, make.ids(f"\n{word}:"), make.ids(f" {number}"), lines=len(rows), depth=round(asked / len(rows), 3)
    )


def _copy(make: _Maker) -> Item:
    """A passage, and the same passage again; scored from its ninth token on."""
    lines, source = make.haystack(make.length)
    passage = make.ids(" ".join(lines))[: make.length - 8]
    context = make.ids("", begin=True) + passage + make.ids("\n\nThe same text again:\n\n")
    copied = passage[:COPIED]
    item = make.item(context + copied[:1], copied[1:2], copied[2:], source=source)
    begin = len(item.forced) - (len(copied) - 8)
    return Item(
        "",
        item.index,
        item.length,
        item.prompt,
        item.forced,
        {MAIN: Span(begin, len(item.forced))},
        (),
        item.question,
        source,
        {},
    )


def _quote(make: _Maker) -> Item:
    """The beginning of an earlier sentence, to be gone on with."""
    lines, source = make.haystack(make.length - 20)
    early = range(max(1, int(0.7 * len(lines))))
    long = [at for at in early if len(make.ids(lines[at])) >= 8 + QUOTED]
    if long:
        quoted = make.ids(lines[make.draw.choice(long)])
    else:
        joined = make.ids(" ".join(lines))
        start = make.draw.randrange(max(1, len(joined) // 2))
        quoted = joined[start : start + 8 + QUOTED]
    question = make.ids('\n\nAs quoted earlier in the text: "') + quoted[:8]
    return make.item(make.ids(" ".join(lines), begin=True), question, quoted[8 : 8 + QUOTED], source=source)


def _labels(make: _Maker) -> Item:
    """Made-up labels of five kinds of things; a new thing is asked."""
    encoded = {label: make.ids(f" {label}\n") for label in LABELS}
    # Some tokenizers give every label the same first token, a space: that part belongs to the question.
    common = 0
    while len({tuple(ids[: common + 1]) for ids in encoded.values()}) == 1:
        common += 1
    names: list[str] = []
    firsts: list[int] = []
    for label, ids in encoded.items():
        if len(ids) > common and ids[common] not in firsts and len(names) < len(CATEGORIES):
            names.append(label)
            firsts.append(ids[common])
    if len(names) < len(CATEGORIES):
        raise ConfigError("this tokenizer gives too few of the made-up labels a first token of their own.")
    order = list(range(len(names)))
    make.draw.shuffle(order)
    label_of = {category: order[at] for at, category in enumerate(CATEGORIES)}
    things = [(word, category) for category, words in CATEGORIES.items() for word in words]
    asked, kind = make.draw.choice(things)
    rest = [thing for thing in things if thing[0] != asked]
    context: list[int] = make.ids("", begin=True)
    while True:
        word, category = make.draw.choice(rest)
        line = make.ids(f"{word} ->") + encoded[names[label_of[category]]]
        if len(context) + len(line) > make.length:
            break
        context += line
    right = label_of[kind]
    choices = (firsts[right], *(first for first in firsts if first != firsts[right]))
    answer = encoded[names[right]]
    return make.item(
        context, make.ids(f"{asked} ->") + answer[:common], answer[common:-1] or answer[common:], choices=choices
    )


def _drift(make: _Maker) -> Item:
    """A fact asked early, a stretch of other text, and the same fact asked again."""
    city, number = make.draw.choice(CITIES), f"{make.draw.randrange(100_000):05d}"
    lines, source = make.haystack(make.length + STRETCH)
    depth = make.draw.random() * 0.5
    lines.insert(round(depth * len(lines)), f"The special magic number for {city} is {number}.")
    ids = make.ids(" ".join(lines), begin=True)
    context, stretch = ids[: make.length], ids[make.length : make.length + STRETCH]
    question = make.ids(f"\n\nThe special magic number for {city} is")
    answer = make.ids(f" {number}")
    tail = make.ids(".\n\n") + stretch + question + answer
    total = len(question) + len(answer) + len(tail)
    spans = {"first": Span(len(question), len(question) + len(answer)), MAIN: Span(total - len(answer), total)}
    return make.item(context, question, answer, tail=tail, spans=spans, source=source, depth=round(depth, 3))


_TASKS: Final[dict[str, tuple[Callable[[_Maker], Item], TaskInfo]]] = {
    "niah1_raw": (_needle, TaskInfo("niah1_raw", "exact", 1e-5, "one 5-digit fact in running text")),
    "kvline": (_lines, TaskInfo("kvline", "exact", 1e-5, "one line of a table of words and 5-digit numbers")),
    "copy_passage": (_copy, TaskInfo("copy_passage", "top1", 0.0, "the same passage again, per token")),
    "quote_as": (_quote, TaskInfo("quote_as", "top1", 0.0, "16 tokens of an earlier sentence, per token")),
    "icl_label5": (_labels, TaskInfo("icl_label5", "choice", 0.2, "five made-up labels learnt from examples")),
    "drift": (_drift, TaskInfo("drift", "exact", 1e-5, "a fact asked, other text, and the fact asked again")),
}
_BOOK = TaskInfo("book", "top1", 0.0, "running text, teacher-forced: KL and agreement with FullKV")


def tasks() -> list[TaskInfo]:
    """All tasks."""
    return [info for _, info in _TASKS.values()]


def task_info(name: str) -> TaskInfo:
    """One task, "book" among them.

    Raises:
        ConfigError: no such task.
    """
    if name == _BOOK.name:
        return _BOOK
    if name not in _TASKS:
        raise ConfigError(f"task must be one of book, {', '.join(_TASKS)}, got {name!r}.")
    return _TASKS[name][1]


def make_items(
    name: str,
    tokenizer: Any,
    texts: Sequence[Text],
    *,
    length: int,
    count: int,
    seed: int = 0,
    question: str = "after",
) -> list[Item]:
    """Seeded items of one task.

    Args:
        texts: what haystacks are made of. length: prompt tokens, roughly. question: "after" or "inside".

    Raises:
        ConfigError: an unknown task or place of the question, or no text.
    """
    info = task_info(name)
    if question not in QUESTIONS:
        raise ConfigError(f"question must be one of {', '.join(QUESTIONS)}, got {question!r}.")
    if not texts:
        raise ConfigError("a task needs at least one text for its haystack.")
    if name not in _TASKS:
        raise ConfigError(f"{info.name} is made elsewhere, not from a seed alone.")
    if length < 128:
        raise ConfigError(f"length must be 128 tokens or more, got {length}.")
    # A text shorter than its haystack would repeat itself: such texts serve only where there are no longer ones.
    long = [text for text in texts if len(encode(tokenizer, text.text)) >= length] or list(texts)
    out = []
    for index in range(count):
        draw = random.Random(f"{seed}/{name}/{length}/{index}")
        made = _TASKS[name][0](_Maker(tokenizer, long, length, draw, index, question))
        out.append(
            Item(
                name,
                index,
                length,
                made.prompt,
                made.forced,
                made.spans,
                made.choices,
                question,
                made.source,
                {**made.notes, "seed": seed},
            )
        )
    return out
