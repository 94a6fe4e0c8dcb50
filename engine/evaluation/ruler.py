"""RULER's thirteen tasks at any length, from seeded generators of our own.

Counts, depths, lengths and metrics follow the published configuration (NVIDIA/RULER, Apache-2.0); sentences are
ours, so figures compare among systems here, not digit by digit with published ones. Tasks whose haystack is an
essay take the given texts and are named `-alt`. QA tasks need a file of the user's. Knows tokenizers, no model.
"""

from __future__ import annotations

import itertools
import json
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.errors import ConfigError, PromptError
from engine.evaluation.items import Text, encode, sentences
from engine.evaluation.sample import Sample
from engine.evaluation.words import WORDS

NOISE: Final = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS: Final = tuple(round(100 * at / 39) for at in range(40))
SEED: Final = 42


@dataclass(frozen=True, slots=True)
class Needles:
    """One needle task: what the haystack is, what keys and values are, and how many."""

    haystack: str
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1


NEEDLES: Final[dict[str, Needles]] = {
    "niah_single_1": Needles("noise"),
    "niah_single_2-alt": Needles("text"),
    "niah_single_3-alt": Needles("text", value="uuid"),
    "niah_multikey_1-alt": Needles("text", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key="uuid", value="uuid"),
    "niah_multivalue-alt": Needles("text", values=4),
    "niah_multiquery-alt": Needles("text", keys=4, queries=4),
}
OTHERS: Final = ("vt", "cwe", "fwe", "qa_1", "qa_2")
RULER: Final = (*NEEDLES, *OTHERS)


def ruler_samples(
    name: str,
    tokenizer: Any,
    texts: Sequence[Text],
    *,
    length: int,
    count: int,
    seed: int = SEED,
    question: str = "after",
    data: Path | None = None,
) -> list[Sample]:
    """Seeded samples of one task; the prompt, its question and the answer's room take at most `length` tokens.

    Args:
        texts: haystacks of the `-alt` tasks. data: the file of qa_1 (SQuAD's format) or qa_2 (HotpotQA's, JSON lines).

    Raises:
        ConfigError: an unknown task, a length too small, or no file for a QA task.
    """
    if name not in RULER:
        raise ConfigError(f"a RULER task must be one of {', '.join(RULER)}, got {name!r}.")
    out = []
    for index in range(count):
        draw = random.Random(f"{seed}/{name}/{length}/{index}")
        if name in NEEDLES:
            made = _needles(name, NEEDLES[name], tokenizer, texts, length, draw, index)
        elif name == "vt":
            made = _variables(tokenizer, length, draw)
        elif name == "cwe":
            made = _common_words(tokenizer, length, draw)
        elif name == "fwe":
            made = _frequent_words(tokenizer, length, draw)
        else:
            made = _questions(name, tokenizer, length, draw, index, data)
        context, asked, references, new_tokens, metric = made
        out.append(
            Sample(
                name,
                index,
                length,
                tuple(encode(tokenizer, context, begin=True)),
                tuple(encode(tokenizer, asked)),
                tuple(references),
                new_tokens,
                metric,
                question=question,
            )
        )
    return out


Made = tuple[str, str, list[str], int, str]


def _longest(build: Callable[[int], str], tokenizer: Any, room: int, *, most: int = 1 << 20) -> str:
    """The text of as many units as fit `room` tokens, by bisection; at least one unit.

    Raises:
        ConfigError: not even one unit fits.
    """

    def fits(units: int) -> bool:
        return len(encode(tokenizer, build(units))) <= room

    if not fits(1):
        raise ConfigError(f"the length is too small for this task: {room} tokens are left for its text.")
    high = 2
    while high <= most and fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return build(low)


def _thing(kind: str, draw: random.Random) -> str:
    if kind == "number":
        return str(draw.randrange(1_000_000, 10_000_000))
    if kind == "uuid":
        return str(uuid.UUID(int=draw.getrandbits(128), version=4))
    return f"{draw.choice(WORDS)}-{draw.choice(WORDS)}"


def _needles(
    name: str, what: Needles, tokenizer: Any, texts: Sequence[Text], length: int, draw: random.Random, index: int
) -> Made:
    kind = {"number": "number", "uuid": "uuid"}[what.value]
    keys = [_thing(what.key, draw) for _ in range(what.keys)]
    values = {key: [_thing(what.value, draw) for _ in range(what.values)] for key in keys}
    asked_keys = keys[: what.queries] if what.queries > 1 else [draw.choice(keys)]
    references = [value for key in asked_keys for value in values[key]]
    facts = [f"One of the special magic {kind}s for {key} is: {value}." for key in keys for value in values[key]]
    draw.shuffle(facts)
    depths = sorted(draw.sample(DEPTHS, len(facts)))
    plural = len(references) > 1
    listed = ", ".join(asked_keys[:-1]) + (", and " if len(asked_keys) > 1 else "") + asked_keys[-1]
    asked = (
        f"\nWhat {'are all the' if plural else 'is the'} special magic {kind}{'s' if plural else ''} for {listed} "
        f"mentioned in the provided text? The special magic {kind}{'s' if plural else ''} for {listed} mentioned in "
        f"the provided text {'are' if plural else 'is'}"
    )
    head = (
        f"Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind}s afterwards.\n"
    )
    extra = random.Random(draw.random())
    distractors = [f"One of the special magic {kind}s for {_thing(what.key, extra)} is: {_thing(what.value, extra)}."]
    story: list[str] = []
    if what.haystack == "text":
        if not texts:
            raise ConfigError(f"{name} needs texts for its haystack.")
        story = sentences(texts[index % len(texts)].text)

    def lines(units: int) -> list[str]:
        if what.haystack == "noise":
            return [NOISE] * units
        if what.haystack == "text":
            return [story[at % len(story)] for at in range(units)]
        while len(distractors) < units:
            distractors.append(
                f"One of the special magic {kind}s for {_thing(what.key, extra)} is: {_thing(what.value, extra)}."
            )
        return distractors[:units]

    def build(units: int) -> str:
        hay = lines(units)
        for depth, fact in sorted(zip(depths, facts, strict=True), reverse=True):
            hay = [*hay[: round(depth / 100 * units)], fact, *hay[round(depth / 100 * units) :]]
        return head + (" " if what.haystack == "text" else "\n").join(hay)

    room = length - len(encode(tokenizer, asked)) - 128
    return _longest(build, tokenizer, room), asked, references, 128, "all"


def _variables(tokenizer: Any, length: int, draw: random.Random) -> Made:
    """Variable tracking: one chain of four hops, and a solved example in front."""

    def chain(hops: int) -> tuple[str, list[str], list[str]]:
        names: list[str] = []
        while len(names) < hops + 1:
            name = "".join(draw.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(5))
            if name not in names:
                names.append(name)
        value = str(draw.randrange(10_000, 100_000))
        rows = [f"VAR {names[0]} = {value}"]
        rows += [f"VAR {later} = VAR {earlier}" for earlier, later in itertools.pairwise(names)]
        return value, names, rows

    def ask(value: str, count: int) -> str:
        return (
            f"\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: by the "
            f"chains of assignments in the text, {count} variables are assigned the value {value}, they are:"
        )

    head = "Memorize and track the chains of variable assignments hidden in the following text.\n"
    shown, shown_names, shown_rows = chain(4)
    solved = head + "\n".join([NOISE, *shown_rows, NOISE]) + ask(shown, 5) + " " + " ".join(shown_names) + "\n\n"
    value, names, rows = chain(4)
    fractions = sorted(draw.random() for _ in rows)
    asked = ask(value, 5)

    def build(units: int) -> str:
        lines = [NOISE] * units
        for fraction, row in reversed(list(zip(fractions, rows, strict=True))):
            at = round(fraction * units)
            lines = [*lines[:at], row, *lines[at:]]
        return solved + head + "\n".join(lines)

    return _longest(build, tokenizer, length - len(encode(tokenizer, asked)) - 30), asked, names, 30, "all"


def _vocabulary(draw: random.Random, count: int) -> list[str]:
    """Distinct words: our list in random order, then words made of syllables."""
    words = list(WORDS)
    draw.shuffle(words)
    seen = set(words)
    while len(words) < count:
        made = "".join(draw.choice("bdfgklmnprstv") + draw.choice("aeiou") for _ in range(3))
        if made not in seen:
            seen.add(made)
            words.append(made)
    return words[:count]


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{at}. {word}" for at, word in enumerate(words, start=1))


def _common_words(tokenizer: Any, length: int, draw: random.Random) -> Made:
    """Ten common words among uncommon ones: 30 and 3 times, below 4,096 tokens 6 times and once."""
    often, seldom = (30, 3) if length >= 4096 else (6, 1)
    ask = "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear most"
    ask += " often in the list are:"
    head = "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones"
    head += " that appear most often.\n"
    words = _vocabulary(draw, 4096)
    common, rest, mixer = words[:10], words[20:], draw.random()
    shown = [word for word in words[10:12] for _ in range(3)] + words[12:20] + words[4000:4006]
    draw.shuffle(shown)
    solved = head + _numbered(shown) + ask + " " + _numbered([*words[10:12], *words[12:20]]) + "\n\n"

    def build(units: int) -> str:
        listed = [word for word in common for _ in range(often)]
        listed += [word for word in rest[:units] for _ in range(seldom)]
        random.Random(mixer).shuffle(listed)
        return solved + head + _numbered(listed)

    room = length - len(encode(tokenizer, ask)) - 120
    return _longest(build, tokenizer, room, most=len(rest) // 2), ask, common, 120, "all"


def _frequent_words(tokenizer: Any, length: int, draw: random.Random) -> Made:
    """Coded words with frequencies of a zeta law (α = 2); rank 0 is shown as dots, ranks 1 to 3 are asked."""
    size = max(4, length // 50)
    words: list[str] = []
    while len(words) < size:
        word = "".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(6))
        if word not in words:
            words.append(word)
    weights = [1.0 / (rank + 1) ** 2.0 for rank in range(size)]
    whole = sum(weights)
    mixer = draw.random()
    ask = (
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently"
    )
    ask += (
        " appeared words in the above coded text? Answer: According to the coded text above, the three most frequently"
    )
    ask += " appeared words are:"
    head = "Read the following coded text and track the frequency of each coded word. Find the three most frequently"
    head += " appeared coded words.\n"

    def build(units: int) -> str:
        listed = [
            "...." if rank == 0 else word
            for rank, (word, weight) in enumerate(zip(words, weights, strict=True))
            for _ in range(round(10 * units * weight / whole))
        ]
        random.Random(mixer).shuffle(listed)
        return head + " ".join(listed)

    room = length - len(encode(tokenizer, ask)) - 50
    return _longest(build, tokenizer, room), ask, words[1:4], 50, "all"


def _questions(name: str, tokenizer: Any, length: int, draw: random.Random, index: int, data: Path | None) -> Made:
    """A question on one paragraph (qa_1) or several (qa_2), among paragraphs of other questions."""
    if data is None:
        kind = "SQuAD's JSON format" if name == "qa_1" else "HotpotQA's distractor format, JSON lines"
        raise ConfigError(f"{name} needs a file in {kind}: name it with --data.")
    asked_of = read_squad(data) if name == "qa_1" else read_hotpot(data)
    text, answers, own = asked_of[index % len(asked_of)]
    others = list(dict.fromkeys(p for _, _, paragraphs in asked_of for p in paragraphs if p not in own))
    draw.shuffle(others)
    places = draw.random()
    ask = f"\nAnswer the question based on the given documents. Only give me the answer.\nQuestion: {text}\nAnswer:"
    head = "Answer the question based on the given documents. The following are given documents.\n\n"

    def build(units: int) -> str:
        shown = [*own, *others[: units - 1]]
        random.Random(places).shuffle(shown)
        return head + "\n\n".join(f"Document {at}:\n{text}" for at, text in enumerate(shown, start=1))

    room = length - len(encode(tokenizer, ask)) - 32
    return _longest(build, tokenizer, room, most=max(2, len(others))), ask, answers, 32, "part"


Question = tuple[str, list[str], list[str]]


def read_squad(path: Path) -> list[Question]:
    """(question, answers, [paragraph]) of a file in SQuAD's format.

    Raises:
        PromptError: not such a file.
    """
    try:
        articles = json.loads(path.read_text("utf-8"))["data"]
        return [
            (qa["question"], list(dict.fromkeys(answer["text"] for answer in qa["answers"])), [paragraph["context"]])
            for article in articles
            for paragraph in article["paragraphs"]
            for qa in paragraph["qas"]
            if qa["answers"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PromptError(f"{path} is no file in SQuAD's format ({type(error).__name__}: {error}).") from error


def read_hotpot(path: Path) -> list[Question]:
    """(question, [answer], supporting paragraphs) of HotpotQA's distractor set, one JSON object a line.

    Raises:
        PromptError: not such a file.
    """
    out: list[Question] = []
    try:
        for line in path.read_text("utf-8").splitlines():
            entry = json.loads(line)
            titles = {title for title, _ in entry["supporting_facts"]}
            paragraphs = [f"{title}\n{''.join(parts)}" for title, parts in entry["context"] if title in titles]
            out.append((entry["question"], [entry["answer"]], paragraphs))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PromptError(f"{path} is no file in HotpotQA's format ({type(error).__name__}: {error}).") from error
    return out
