"""FullKV walks ahead of a teacher-forced comparison: it chooses the tokens, the systems follow.

Some steps ahead where an oracle must know the future, else in lockstep. Knows a step function; knows no cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import Tensor

from engine.baselines.outputs import OutputProbe


@dataclass(frozen=True, slots=True)
class LedStep:
    """One step of FullKV.

    Attributes:
        fed: the token that it was given. choice: the token that it chose.
        truth: log-probabilities float32 [vocabulary]. outputs: attention outputs, see `OutputProbe.take`.
    """

    fed: int
    choice: int
    truth: Tensor
    outputs: Tensor


class Leader:
    """FullKV's greedy steps, kept until the systems have taken them.

    Args:
        step: feeds one token and returns its logits, float32 [vocabulary]. first: the token to begin with.
        limit: most steps. ends: tokens after which there is no step. ahead: steps beyond the one handed out.
    """

    def __init__(
        self,
        step: Callable[[int], Tensor],
        probe: OutputProbe,
        first: int,
        *,
        limit: int,
        ends: Collection[int],
        ahead: int,
    ) -> None:
        self._step, self._probe, self._token = step, probe, first
        self._left, self._ends, self._ahead = limit, ends, ahead
        self._taken: deque[LedStep] = deque()

    def run_ahead(self) -> None:
        """Takes the steps that must be known before the systems take theirs."""
        self._fill(self._ahead)

    @property
    def more(self) -> bool:
        """Whether there is a step that was not handed out."""
        return bool(self._taken) or self._goes_on

    def next(self) -> LedStep:
        """The next step for the systems."""
        self._fill(self._ahead + 1)
        return self._taken.popleft()

    @property
    def _goes_on(self) -> bool:
        return self._left > 0 and self._token not in self._ends

    def _fill(self, steps: int) -> None:
        while len(self._taken) < steps and self._goes_on:
            fed = self._token
            truth = self._step(fed).log_softmax(-1)
            self._token = int(truth.argmax())
            self._left -= 1
            self._taken.append(LedStep(fed, self._token, truth, self._probe.take()))
