"""Which form a model's weights run in, and the change of a loaded model into it.

The embedded model keeps its file's own 4-bit codes for decoding and takes wider weights for prompts; any other model
stays as it is unless asked. The change is made in the model, so every cache that runs with it meets the same
weights. Which form is the fastest is measured on the machine, see `weights_probe`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from engine import weights_probe as probe
from engine.errors import ConfigError
from engine.gguf_codes import unpack
from engine.weight_forms import FORMS, CodedRows, LowBitLinear, PlainRows, Rows, runs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = ("auto", "float32", "int4", "float16", "bfloat16")
_SAMPLED_LAYERS = 8
_EXACTNESS_BONUS = 1.15
"""A less exact form must be this much faster to be taken."""
_BY_EXACTNESS = ("float32", "float16", "int4", "bfloat16")


@dataclass(frozen=True, slots=True)
class Plan:
    """Forms of a model's linear layers.

    Attributes:
        few: form for up to `few_rows` rows. many: form for more. head: form of the output layer.
    """

    few: str
    many: str
    few_rows: int
    head: str


UNCHANGED = Plan("float32", "float32", 0, "float32")


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of a model's weights.

    Attributes:
        path: "int4", "float16", "bfloat16", or the dtype where nothing was changed.
        error: relative error of the logits against float32, the larger of decoding and prompt; None = unchanged.
    """

    path: str
    error: float | None


class Codes:
    """The 4-bit codes that lie beside a converted model, read layer by layer.

    Args:
        path: of the file; one that is None or missing holds nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._file: Any = safe_open(str(path), "pt") if path is not None and path.is_file() else None
        names = self._file.keys() if self._file is not None else []
        self.names = {name.removesuffix(".codes") for name in names if name.endswith(".codes")}

    def fit(self, name: str) -> bool:
        """Whether the layer `name` has codes, of a shape that torch's int4 kernel takes."""
        if name not in self.names:
            return False
        out_features, groups = self._file.get_slice(f"{name}.scale").get_shape()
        in_features = 2 * self._file.get_slice(f"{name}.codes").get_shape()[1]
        return CodedRows.fits(out_features, in_features, groups)

    def rows(self, name: str) -> CodedRows:
        """The layer `name` by torch's int4 kernel."""
        codes, scale, minimum = (self._file.get_tensor(f"{name}.{part}") for part in ("codes", "scale", "minimum"))
        return CodedRows(unpack(codes), scale, minimum)


def settle(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: str,
    *,
    dtype_asked: str,
    fingerprint: str,
    codes_file: Path | None,
) -> Settled:
    """Changes `model` in place to the form that is asked for, or leaves it.

    "auto" changes a model that has codes, on a CPU, where nobody asked for a dtype. The first time on a machine it
    measures for some five seconds and keeps the result.

    Raises:
        ConfigError: an unknown form, or one that this model or machine cannot run.
    """
    if asked not in WEIGHTS:
        raise ConfigError(f"weights must be one of {', '.join(WEIGHTS)}, got {asked!r}.")
    unchanged = Settled(str(model.dtype).removeprefix("torch."), None)
    codes = Codes(codes_file)
    plain = model.device.type == "cpu" and model.dtype == torch.float32
    if asked in ("float32", "auto"):
        if asked == "float32" and model.dtype != torch.float32:
            raise ConfigError(f"weights float32 need dtype float32, got {unchanged.path}: leave one of them on auto.")
        if asked == "float32" or not plain or not codes.names or dtype_asked != "auto":
            return unchanged
    elif not plain:
        raise ConfigError(
            f"weights {asked} need float32 activations on the CPU, got {unchanged.path} on {model.device.type}: "
            "take weights auto."
        )
    elif asked == "int4" and not codes.names:
        raise ConfigError("weights int4 need a model that comes with 4-bit codes, as the embedded one does.")
    elif not runs(asked):
        raise ConfigError(f"weights {asked} cannot be run by this machine's torch: take weights auto.")
    return _change(model, tokenizer, asked, fingerprint, codes)


def weights_report() -> dict[str, Any]:
    """What has been measured on this machine: the forms taken, their milliseconds, and their error."""
    here = probe.machine()
    return {**here, "measured": [record for record in probe.records() if record.get("machine") == here]}


def _change(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: str, fingerprint: str, codes: Codes
) -> Settled:
    record = probe.find_record(fingerprint, asked)
    plan = _plan_of(record, codes)
    if record is None or plan is None:
        plan, milliseconds = _measure(model, asked, codes)
        record = {"machine": probe.machine(), "fingerprint": fingerprint, "asked": asked, "plan": asdict(plan)}
        record["ms"] = milliseconds
        ids = probe.text_ids(model, tokenizer)
        exact = probe.logits(model, ids)
        apply(model, plan, codes)
        record["error"] = _errors(model, ids, exact)
        record["tokens"] = int(ids.shape[1])
        probe.keep_record(record)
    else:
        apply(model, plan, codes)
    if plan == UNCHANGED:
        return Settled("float32", None)
    return Settled(plan.few, max(float(part["relative"]) for part in record["error"].values()))


def _plan_of(record: dict[str, Any] | None, codes: Codes) -> Plan | None:
    """The plan of a record, where it is whole and can still be run."""
    try:
        plan = Plan(**record["plan"]) if record is not None else None
        forms = {plan.few, plan.many, plan.head} if plan is not None else set()
        errors = [float(part["relative"]) for part in record["error"].values()] if record is not None else []
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    if plan is None or not errors or not isinstance(plan.few_rows, int) or ("int4" in forms and not codes.names):
        return None
    return plan if all(form in _BY_EXACTNESS and runs(form) for form in forms) else None


def _measure(model: PreTrainedModel, asked: str, codes: Codes) -> tuple[Plan, dict[str, Any]]:
    """Times some layers of the model in every form that `asked` allows, and chooses."""
    linears = _linears(model)
    few_forms = ["float32", "float16", "int4"] if asked == "auto" else [asked]
    many_forms = ["float32", "float16", "bfloat16"] if asked in ("auto", "int4") else [asked]
    forms = [form for form in _BY_EXACTNESS if form in {*few_forms, *many_forms} and runs(form)]
    shape = max((layer.weight.shape for layer in linears.values()), key=lambda size: size[0] * size[1])
    sample = [name for name, layer in linears.items() if layer.weight.shape == shape][:_SAMPLED_LAYERS]
    if not all(codes.fit(name) for name in sample):
        forms = [form for form in forms if form != "int4"]
    layers: dict[str, list[Rows]] = {}
    for form in forms:
        layers[form] = [_rows(form, linears[name].weight, name, codes) for name in sample]
    spent = probe.time_forms(layers, many_forms, shape[1])
    few = _fastest({form: spent[form][probe.FEW_ROWS[0]] for form in forms if form in few_forms})
    many = _fastest({form: spent[form][probe.PROMPT_ROWS] for form in forms if form in many_forms})
    few_rows = 0 if few == many else 1
    for rows in probe.FEW_ROWS[1:]:
        # A form without a time was far slower than another.
        if few == many or spent[few].get(rows, math.inf) > spent[many].get(rows, math.inf):
            break
        few_rows = rows
    head = "float16" if {few, many} != {"float32"} and runs("float16") else "float32"
    # JSON has strings as keys.
    milliseconds = {form: {str(rows): ms for rows, ms in took.items()} for form, took in spent.items()}
    return Plan(few, many, few_rows, head), milliseconds


def _fastest(milliseconds: dict[str, float]) -> str:
    """The fastest form; of two that are close, the more exact one."""
    taken = ""
    for form in _BY_EXACTNESS:
        if form in milliseconds and (not taken or milliseconds[form] * _EXACTNESS_BONUS < milliseconds[taken]):
            taken = form
    return taken


def _linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The plain linear layers by name, without the output layer: its result, the logits, stays float32."""
    head = model.get_output_embeddings()
    return {n: layer for n, layer in model.named_modules() if type(layer) is nn.Linear and layer is not head}


def _rows(form: str, weight: Tensor, name: str, codes: Codes) -> Rows:
    if form == "int4":
        return codes.rows(name)
    return FORMS[form](weight.detach())


def apply(model: PreTrainedModel, plan: Plan, codes: Codes) -> None:
    """Puts the forms of `plan` in place of the model's linear layers, one after the other.

    A layer without codes, or of a shape that the int4 kernel does not take, runs its few rows in the form for many.
    """
    if plan == UNCHANGED:
        return
    with torch.no_grad():
        linears = _linears(model)
        for name in list(linears):
            # Popped, so that each float32 weight goes before the next layer is changed.
            layer = linears.pop(name)
            few = plan.many if plan.few == "int4" and not codes.fit(name) else plan.few
            wide = FORMS[plan.many](layer.weight.detach())
            narrow = wide if few == plan.many else _rows(few, layer.weight, name, codes)
            _replace(model, name, layer, narrow, wide, plan.few_rows)
        head = model.get_output_embeddings()
        name = next((n for n, module in model.named_modules() if module is head), "")
        if name and type(head) is nn.Linear:
            form = FORMS[plan.head](head.weight.detach())
            _replace(model, name, head, form, form, 0)
        # What is left may be views of the mapped checkpoint, and one view keeps all of its pages.
        for parameter in model.parameters():
            if parameter.numel():
                parameter.data = parameter.data.clone()


def _replace(model: PreTrainedModel, name: str, layer: nn.Linear, few: Rows, many: Rows, few_rows: int) -> None:
    if isinstance(few, PlainRows) and few is many:
        return
    new = LowBitLinear(few, many, few_rows, layer.in_features, layer.out_features, layer.bias)
    if layer.weight is _embedding_weight(model):
        # The embedding keeps the tied weight alive in any case.
        new.weight = layer.weight
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new.eval())


def _embedding_weight(model: PreTrainedModel) -> Any:
    return getattr(model.get_input_embeddings(), "weight", None)


def _errors(model: PreTrainedModel, ids: Tensor, exact: Tensor) -> dict[str, dict[str, float]]:
    """Error of either form alone, by sending every row of the text through it."""
    changed = [module for module in model.modules() if isinstance(module, LowBitLinear)]
    limits = [module.few_rows for module in changed]
    found = {}
    for part, limit in (("decode", ids.numel()), ("prompt", 0)):
        for module in changed:
            module.few_rows = limit
        found[part] = probe.compare(probe.logits(model, ids), exact)
    for module, limit in zip(changed, limits, strict=True):
        module.few_rows = limit
    return found
