"""What a teacher-forced comparison adds up step by step: divergence, agreement, perplexity, error of outputs.

Knows logits and attention outputs; knows no model and no cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.baselines.recorder import FutureMasses
from engine.comparison import SystemResult, relative_error


class Tally:
    """Sums of one comparison; fills `kl_steps` of the results as it goes.

    Args:
        results: of the systems, in order.
    """

    def __init__(self, results: Sequence[SystemResult]) -> None:
        self._results = list(results)
        self._truth: list[float] = []
        self._losses: list[list[float]] = [[] for _ in results]
        self._agreed: list[list[bool]] = [[] for _ in results]
        self._errors: list[list[Tensor]] = [[] for _ in results]

    @property
    def perplexity(self) -> float | None:
        """FullKV's on its own tokens; None before the first step."""
        return perplexity(self._truth) if self._truth else None

    def begin(self, truth: Tensor, choice: int) -> None:
        """A step of FullKV: its log-probabilities [vocabulary] and the token that it chose."""
        self._truth.append(-float(truth[choice]))

    def add(
        self, number: int, own: Tensor, truth: Tensor, choice: int, outputs: Tensor, full: Tensor
    ) -> tuple[float, bool]:
        """The same step of a system: (KL(FullKV ‖ system) in nats, whether its likeliest token is FullKV's).

        Args:
            own, truth: log-probabilities. outputs, full: attention outputs [layers, heads, d].
        """
        divergence = float((truth.exp() * (truth - own)).sum().clamp_min(0.0))
        agrees = int(own.argmax()) == choice
        self._results[number].kl_steps.append(divergence)
        self._agreed[number].append(agrees)
        self._losses[number].append(-float(own[choice]))
        self._errors[number].append(relative_error(outputs, full))
        return divergence, agrees

    def finish(self, masses: FutureMasses | None, churn: Sequence[Sequence[float]]) -> None:
        """Writes what the steps have shown into the results.

        Args:
            masses: closed; None where none were taken. churn: between looks, per system.
        """
        if not self._truth:
            return
        truth = perplexity(self._truth)
        for number, result in enumerate(self._results):
            result.kl = sum(result.kl_steps) / len(result.kl_steps)
            result.agreement = sum(self._agreed[number]) / len(self._agreed[number])
            result.perplexity = perplexity(self._losses[number])
            result.perplexity_difference = result.perplexity - truth
            result.output_error = [float(value) for value in torch.stack(self._errors[number]).mean(0)]
            if masses is not None and masses.closed[number]:
                result.future = masses.closed[number]
                result.fmm = sum(event.fmm for event in result.future) / len(result.future)
                result.fmm_fp_only = sum(event.fp_only for event in result.future) / len(result.future)
            if churn[number]:
                result.churn = sum(churn[number]) / len(churn[number])


def perplexity(losses: Sequence[float]) -> float:
    """exp of the mean loss."""
    return math.exp(sum(losses) / len(losses))
