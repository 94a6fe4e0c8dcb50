"""Non-uniform codebooks of KVQuant, and their calibration on a bundled text.

Keys before RoPE are normalised per channel by thresholds measured offline; values per token online.
What remains is one codebook of 2^b centroids per layer for keys and one for values: k-means, weighted
by squared gradients where `fisher` is on. Calibration is kept with the model object.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from engine.adapter import cache_keyword, enable
from engine.errors import ConfigError
from engine.rope import RopeTable, find_rotary
from engine.tagged_layer import TaggedLayer

TEXT = Path(__file__).with_name("calibration.txt")
ROUNDS = 50
MOST_POINTS = 40_000
"""Points that k-means looks at, evenly picked: more change the centroids by less than float16 shows."""


@dataclass(frozen=True, slots=True)
class Codebook:
    """What one layer needs to code keys and values.

    key_low, key_high: thresholds per channel [H·d], float16; beyond them a key is an outlier.
    key_lut, value_lut: centroids in [-1, 1], ascending, float16 [2^b].
    """

    key_low: Tensor
    key_high: Tensor
    key_lut: Tensor
    value_lut: Tensor


@dataclass(frozen=True, slots=True)
class Samples:
    """Calibration keys before RoPE and values of every layer [T, H·d], and squared gradients where asked for."""

    key: list[Tensor]
    value: list[Tensor]
    key_weight: list[Tensor] | None
    value_weight: list[Tensor] | None
    text_hash: str


def kmeans(points: Tensor, weights: Tensor | None, count: int, rounds: int = ROUNDS) -> Tensor:
    """`count` centroids of 1-D points, ascending, by Lloyd's rounds from distinct values or quantiles.

    Args:
        points: float [N]. weights: [N] or None.
    """
    device = points.device
    points, order = points.cpu().double().sort()
    weights = torch.ones_like(points) if weights is None else weights.cpu().double()[order]
    distinct = points.unique()
    if len(distinct) <= count:
        return (
            torch.nn.functional.pad(distinct, (0, count - len(distinct)), value=float(distinct[-1])).float().to(device)
        )
    at = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    centroids = torch.quantile(distinct, at)
    mass = torch.nn.functional.pad(weights.cumsum(0), (1, 0))
    moment = torch.nn.functional.pad((weights * points).cumsum(0), (1, 0))
    for _ in range(rounds):
        cuts = torch.searchsorted(points, (centroids[1:] + centroids[:-1]) / 2)
        ends = torch.nn.functional.pad(cuts, (1, 0))
        stops = torch.nn.functional.pad(cuts, (0, 1), value=len(points))
        total = mass[stops] - mass[ends]
        moved = torch.where(total > 0, (moment[stops] - moment[ends]) / total.clamp_min(1e-300), centroids)
        if torch.equal(moved, centroids):
            break
        centroids = moved
    return centroids.sort().values.float().to(device)


def nearest(values: Tensor, lut: Tensor) -> Tensor:
    """uint8 code of the nearest centroid; `lut` ascending."""
    table = lut.float()
    return torch.bucketize(values, (table[1:] + table[:-1]) / 2).to(torch.uint8)


def normalised(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """(x - centre) / half-range; 0 where the range is empty."""
    half = (high - low) / 2
    return torch.where(half > 0, (values - (high + low) / 2) / half.clamp_min(1e-30), 0.0)


def split_counts(width: int, share: float) -> tuple[int, int]:
    """Outliers of a vector at its lower and upper end: ⌈share · width⌉ in all."""
    count = -int(-share * width // 1)
    return count // 2, count - count // 2


def value_outliers(values: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """(mask, low, high) per token [..., n]: exactly ⌈share · n⌉ outliers whatever the ties, and the others' range."""
    below, above = split_counts(values.shape[-1], share)
    order = values.sort(dim=-1, stable=True).indices
    last = values.shape[-1] - above
    mask = torch.zeros_like(values, dtype=torch.bool)
    mask.scatter_(-1, torch.cat([order[..., :below], order[..., last:]], -1), True)
    inner = values.gather(-1, order[..., below:last])
    return mask, inner[..., 0], inner[..., -1]


def fit(samples: Samples, bits: int, share: float, layer: int, qnorm: bool) -> Codebook:
    """Thresholds and codebooks of one layer."""
    key, value = samples.key[layer].float(), samples.value[layer].float()
    tail = share / 2
    low, high = torch.quantile(key, tail, dim=0), torch.quantile(key, 1 - tail, dim=0)
    low, high = low.to(torch.float16), high.to(torch.float16)
    inside = (key >= low.float()) & (key <= high.float())
    key_weight = None if samples.key_weight is None else samples.key_weight[layer][inside]
    key_points = normalised(key, low.float(), high.float())[inside]
    mask, bottom, top = value_outliers(value, share)
    value_weight = None if samples.value_weight is None else samples.value_weight[layer][~mask]
    value_points = normalised(value, bottom[:, None], top[:, None])[~mask]
    luts = [
        _lut(points, weights, 2**bits, qnorm)
        for points, weights in ((key_points, key_weight), (value_points, value_weight))
    ]
    return Codebook(low, high, luts[0], luts[1])


def _lut(points: Tensor, weights: Tensor | None, count: int, qnorm: bool) -> Tensor:
    stride = max(1, len(points) // MOST_POINTS)
    points = points[::stride]
    lut = kmeans(points, None if weights is None else weights[::stride] + 1e-30, count)
    if qnorm:
        coded = lut[nearest(points, lut).long()]
        lut = (lut - coded.mean()) / coded.std().clamp_min(1e-12) * points.std() + points.mean()
    return lut.to(torch.float16)


class _Probe(TaggedLayer):
    """Collects a layer's keys and values and attends plainly, so that gradients flow."""

    def __init__(self, fisher: bool) -> None:
        super().__init__()
        self.fisher = fisher
        self.key: Tensor = torch.empty(0)
        self.value: Tensor = torch.empty(0)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.key, self.value = key_states, value_states
        if self.fisher:
            # Part of the graph where weights want gradients; else the graph begins here.
            self.key, self.value = (
                states if states.requires_grad else states.detach().requires_grad_()
                for states in (key_states, value_states)
            )
        return self.tag(self.key), self.value

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scale: float,
        softcap: float | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        batch, heads, tokens, dim = query.shape
        grouped = query.reshape(batch, key.shape[1], -1, tokens, dim)
        logits = grouped @ key.unsqueeze(2).transpose(-1, -2) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
        probs = logits.float().masked_fill(later, -torch.inf).softmax(-1).to(value.dtype)
        return (probs @ value.unsqueeze(2)).reshape(batch, heads, tokens, dim)


_SAMPLES: WeakKeyDictionary[nn.Module, dict[tuple[int, bool], Samples]] = WeakKeyDictionary()
_BOOKS: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], list[Codebook]]] = WeakKeyDictionary()


def collect(model: PreTrainedModel, tokenizer: Any, tokens: int, fisher: bool) -> Samples:
    """Keys and values of the bundled text; kept with the model.

    Raises:
        ConfigError: no tokenizer.
    """
    known = _SAMPLES.setdefault(model, {})
    if (tokens, fisher) in known:
        return known[tokens, fisher]
    if tokenizer is None:
        raise ConfigError("kvquant calibrates on a bundled text: give the model's tokenizer in the run plan.")
    text = TEXT.read_text(encoding="utf-8")
    ids = torch.tensor([tokenizer(text)["input_ids"][:tokens]], device=model.device)
    config = model.config.get_text_config(decoder=True)
    probes = [_Probe(fisher) if type(layer) is DynamicLayer else layer for layer in DynamicCache(config=config).layers]
    cache = Cache(layers=probes)
    enable(model)
    ours = [(index, layer) for index, layer in enumerate(probes) if isinstance(layer, _Probe)]
    with torch.inference_mode(False), torch.set_grad_enabled(fisher), _Passable(model if fisher else None):
        output = model(input_ids=ids, use_cache=True, **{cache_keyword(model): cache})
        grads: list[tuple[Tensor, Tensor]] = []
        if fisher:
            loss = torch.nn.functional.cross_entropy(output.logits[0, :-1].float(), ids[0, 1:], reduction="sum")
            grads = _gradients(loss, [layer for _, layer in ours])
    types = getattr(config, "layer_types", None)
    table = RopeTable(find_rotary(model), types[ours[0][0]] if types else None, ids.device)
    table.ensure(ids.shape[1])
    at = torch.arange(ids.shape[1], device=ids.device)

    def flat(states: Tensor) -> Tensor:
        return states.detach()[0].float().transpose(0, 1).flatten(1)

    # A rotation turns gradients as it turns keys.
    samples = Samples(
        key=[flat(table.undo(layer.key.detach().float(), at)) for _, layer in ours],
        value=[flat(layer.value) for _, layer in ours],
        key_weight=[flat(table.undo(key.float(), at)).square() for key, _ in grads] if fisher else None,
        value_weight=[flat(value).square() for _, value in grads] if fisher else None,
        text_hash=hashlib.sha256(text.encode()).hexdigest()[:16],
    )
    known[tokens, fisher] = samples
    return samples


class _ThroughLinear(torch.autograd.Function):
    """Gradient of a linear layer whose weight is held in another form: asked for with unit vectors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, module: nn.Module) -> Tensor:
        ctx.module, ctx.width = module, x.shape[-1]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        units = torch.eye(ctx.width, dtype=grads[0].dtype, device=grads[0].device)
        with torch.no_grad():
            weight = ctx.module.forward(units) - ctx.module.forward(units[:1] * 0)
        return grads[0] @ weight.T, None, None


class _Passable:
    """While it is open, gradients pass every linear layer of a model; None changes nothing."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        def through(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
            answer: Tensor = _ThroughLinear.apply(inputs[0], out.detach(), module)  # type: ignore[no-untyped-call]
            return answer

        for module in [] if self._model is None else self._model.modules():
            if hasattr(module, "in_features") and not isinstance(module, nn.Linear):
                self._handles.append(module.register_forward_hook(through))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


def _gradients(loss: Tensor, layers: list[_Probe]) -> list[tuple[Tensor, Tensor]]:
    """Gradients at every layer's keys and values.

    Raises:
        ConfigError: none arrives below the last layer.
    """
    states = [states for layer in layers for states in (layer.key, layer.value)]
    found = torch.autograd.grad(loss, states, allow_unused=True)
    if not any(grad is not None and bool(grad.any()) for grad in found[:-2]):
        raise ConfigError("fisher needs a model that gradients pass through; this one stops them: set fisher to false.")
    full = [torch.zeros_like(at) if grad is None else grad for at, grad in zip(states, found, strict=True)]
    return list(zip(full[::2], full[1::2], strict=True))


def codebooks(
    model: PreTrainedModel, tokenizer: Any, *, bits: int, share: float, tokens: int, fisher: bool, qnorm: bool
) -> list[Codebook]:
    """One codebook per managed layer, made once for a model."""
    known = _BOOKS.setdefault(model, {})
    wanted = (bits, share, tokens, fisher, qnorm)
    if wanted not in known:
        samples = collect(model, tokenizer, tokens, fisher)
        known[wanted] = [fit(samples, bits, share, layer, qnorm) for layer in range(len(samples.key))]
    return known[wanted]
