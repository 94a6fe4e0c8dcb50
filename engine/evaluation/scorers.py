"""Published metrics, written anew: containment (RULER), token F1, ROUGE-L and labels (LongBench), GSM8K's answers.

All take strings and give figures in [0, 1]; none knows a model, a prompt or a file.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")


def contains_all(answer: str, references: Sequence[str]) -> float:
    """Share of the references that the answer holds, case aside (RULER, all tasks but QA)."""
    if not references:
        raise ValueError("an answer needs at least one reference.")
    text = answer.lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def contains_any(answer: str, references: Sequence[str]) -> float:
    """1 where the answer holds any of the references, case aside (RULER's QA)."""
    return max(contains_all(answer, [reference]) for reference in references)


def normalised(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return _ARTICLES.sub(" ", bare).split()


def token_f1(answer: str, references: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over the multiset of normalised words, best reference."""
    ours = normalised(answer)

    def one(reference: str) -> float:
        theirs = normalised(reference)
        common = sum((Counter(ours) & Counter(theirs)).values())
        if not common:
            return 0.0
        precision, recall = common / len(ours), common / len(theirs)
        return 2 * precision * recall / (precision + recall)

    return max(one(reference) for reference in references)


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """F measure (β = 1) of the longest common subsequence of words, best reference."""
    ours = answer.split()

    def one(reference: str) -> float:
        theirs = reference.split()
        longest = _common_subsequence(ours, theirs)
        if not longest:
            return 0.0
        precision, recall = longest / len(ours), longest / len(theirs)
        return 2 * precision * recall / (precision + recall)

    return max(one(reference) for reference in references)


def _common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    row = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for at, other in enumerate(second, start=1):
            above = row[at]
            row[at] = diagonal + 1 if word == other else max(row[at], row[at - 1])
            diagonal = above
    return row[-1]


def label_match(answer: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """Containment of the right class, shared among all classes that the answer holds (TREC in LongBench).

    A class that is part of the right one, and of no other place, does not count as another class.
    """
    best = 0.0
    for reference in references:
        held = [name for name in classes if name in answer and not (name in reference and name != reference)]
        if reference in held:
            best = max(best, 1.0 / len(held))
    return best


def first_line(answer: str) -> str:
    """What counts of an answer in LongBench's few-shot tasks: the first line that is not empty."""
    return answer.lstrip("\n").split("\n")[0]


@dataclass(frozen=True, slots=True)
class MathScore:
    """One GSM8K answer.

    Attributes:
        strict: the number after "#### " is right. flexible: the last number of the text is right.
        robust: the number after the last marker is right; without a marker, the last number, `fallback` then.
        marked: the text has a marker. fallback: the last number was taken for want of a marker.
    """

    strict: bool
    flexible: bool
    robust: bool
    marked: bool
    fallback: bool


def gold_number(solution: str) -> str:
    """The number after "####" of a GSM8K solution, without commas.

    Raises:
        ValueError: there is none.
    """
    _, mark, rest = solution.partition("####")
    if not mark:
        raise ValueError("a GSM8K solution must end with #### and a number.")
    return rest.strip().replace(",", "")


def gsm8k(answer: str, solution: str) -> MathScore:
    """Strict and flexible matches as the usual harness has them, and one that mends a run-on answer."""
    gold = gold_number(solution)
    own = answer.split("Question:")[0]
    strict = _STRICT.search(own)
    flexible = _FLEXIBLE.findall(own)
    last = next((part for part in flexible[-1] if part), "") if flexible else ""
    marked, after = _after_last_marker(own)
    numbers = _NUMBER.findall(after if marked else own)
    picked = "" if not numbers else numbers[0] if marked else numbers[-1]
    return MathScore(
        strict=strict is not None and _same(strict.group(1), gold),
        flexible=_same(last, gold),
        robust=_same(picked, gold),
        marked=marked,
        fallback=not marked and bool(numbers),
    )


def _after_last_marker(text: str) -> tuple[bool, str]:
    """(found, what follows): the last of "####", \\boxed{ and "answer:" or "answer is"."""
    places = [match.end() for match in re.finditer(r"####|\\boxed\{|answer\s*(?:is)?\s*:?", text, re.IGNORECASE)]
    places = [place for place in places if _NUMBER.search(text[place:])]
    return (True, text[places[-1] :]) if places else (False, text)


def _same(found: str, gold: str) -> bool:
    plain = found.replace(",", "").replace("$", "").rstrip(".")
    try:
        return abs(float(plain) - float(gold)) < 1e-6
    except ValueError:
        return False


def degenerate(answer: str, *, repeats: int = 4) -> bool:
    """Whether the end of an answer is one line or one stretch of words again and again."""
    words = answer.split()
    for length in range(1, max(1, len(words) // repeats) + 1):
        tail = words[-length * repeats :]
        if len(tail) == length * repeats and tail == tail[:length] * repeats:
            return True
    return False


METRICS: Final[Mapping[str, Callable[[str, Sequence[str]], float]]] = {
    "all": contains_all,
    "part": contains_any,
    "f1": token_f1,
    "rouge_l": rouge_l,
}
"""Metrics that need an answer and references alone."""
