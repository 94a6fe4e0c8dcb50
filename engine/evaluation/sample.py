"""A question that is answered by generating: a context, what is asked, and how the answer is scored.

Plain data. Knows no tokenizer and no model.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.evaluation import scorers

QUESTIONS = ("after", "inside")
METRICS = (*scorers.METRICS, "label", "gsm8k")


@dataclass(frozen=True, slots=True)
class Sample:
    """One item of a published benchmark.

    Attributes:
        task: such as "vt". index, length: as for an `Item`.
        context: token ids that come first. asked: those of the question and the answer's beginning.
        references: right answers. new_tokens: most tokens of the answer. metric: one of `METRICS`.
        classes: all labels, for "label". first_line: only the answer's first line counts.
        stop: strings that end the answer. question: "after" compression, or "inside" the prompt.
    """

    task: str
    index: int
    length: int
    context: tuple[int, ...]
    asked: tuple[int, ...]
    references: tuple[str, ...]
    new_tokens: int
    metric: str
    classes: tuple[str, ...] = ()
    first_line: bool = False
    stop: tuple[str, ...] = ()
    question: str = "after"
    source: str = ""

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ConfigError(f"metric must be one of {', '.join(METRICS)}, got {self.metric!r}.")
        if self.question not in QUESTIONS:
            raise ConfigError(f"question must be one of {', '.join(QUESTIONS)}, got {self.question!r}.")
        if not self.asked or not self.references:
            raise ConfigError(f"sample {self.task} {self.index} needs a question and a reference.")

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids that are prefilled together."""
        return self.context + (self.asked[:-1] if self.question == "inside" else ())

    @property
    def fed(self) -> tuple[int, ...]:
        """Token ids that are fed one by one after compression, before the answer."""
        return self.asked[-1:] if self.question == "inside" else self.asked

    @property
    def forced(self) -> tuple[int, ...]:
        """What is fed and the room of the answer, for the planned length."""
        return self.fed + (0,) * self.new_tokens

    @property
    def prompt_hash(self) -> str:
        """16 hex digits over all token ids."""
        text = json.dumps([self.context, self.asked], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def score(self, answer: str) -> dict[str, float]:
        """The metric's figures; "score" is the one that decides."""
        text = scorers.first_line(answer) if self.first_line else answer
        if self.metric == "label":
            return {"score": scorers.label_match(text, self.references, self.classes)}
        if self.metric == "gsm8k":
            found = scorers.gsm8k(text, self.references[0])
            figures = {name: float(getattr(found, name)) for name in found.__slots__}
            return {"score": figures["robust"], **figures}
        return {"score": scorers.METRICS[self.metric](text, self.references)}
