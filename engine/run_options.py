"""What a run does besides the cache's own settings."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a run does besides the cache's own settings.

    Attributes:
        max_new_tokens: most tokens to generate, 1 or more.
        temperature: 0 takes the likeliest token. top_p: nucleus, (0, 1].
        seed: of the sampling generator.
        reference: run FullKV beside it, for FMM, mass shares and churn.
        horizon: H of future missed mass, tokens.
        keyframe_every: routing events between two keyframes.
        prefill_chunk: prompt tokens per forward; None = 512.
        chat: wrap the prompt in the model's chat template where it has one.
        ignore_eos: go on after an end-of-sequence token.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    reference: bool = True
    horizon: int = 32
    keyframe_every: int = 32
    prefill_chunk: int | None = None
    chat: bool = True
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, holds, rule in (
            ("max_new_tokens", self.max_new_tokens >= 1, "1 or more"),
            ("temperature", self.temperature >= 0.0, "0 or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("horizon", self.horizon >= 1, "1 or more"),
            ("keyframe_every", self.keyframe_every >= 1, "1 or more"),
            ("prefill_chunk", self.prefill_chunk is None or self.prefill_chunk >= 1, "1 or more"),
        ):
            if not holds:
                raise ConfigError(f"{name} must be {rule}, got {getattr(self, name)}.")
