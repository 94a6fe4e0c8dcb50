"""Tiny random models of every supported family and RoPE layout, for tests that need a real architecture.

A few thousand weights, float32, eager attention, a fixed seed. The weights are spread wider than a fresh model's, so
that attention is neither flat nor one-hot and greedy tokens have no near ties.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.phi3 import Phi3Config
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

from engine.models import LoadedModel, fingerprint, max_positions

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
ROPES = ("default", "linear", "llama3", "yarn", "longrope")
GROUPS = (1, 3, 4, 7, 8)
COMBINATIONS = tuple(
    (architecture, rope)
    for architecture in ARCHITECTURES
    for rope in ROPES
    if architecture != "phi3" or rope in ("default", "longrope")
    # Release 5.0 reads one original length for all layer types, and fails on gemma3's.
    if (architecture, rope) != ("gemma3", "yarn") or not transformers.__version__.startswith("5.0.")
)
"""(architecture, rope) pairs that the installed transformers accepts."""
VOCAB = 260
BOS, EOS = 256, 257

_CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "phi3": Phi3Config,
}


def tiny_model(
    architecture: str = "llama",
    *,
    rope: str = "default",
    groups: int = 3,
    head_dim: int = 16,
    num_kv_heads: int = 2,
    num_layers: int = 2,
    hidden_size: int | None = None,
    positions: int = 4096,
    spread: float = 0.2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> PreTrainedModel:
    """A random model in eval mode on the CPU.

    Args:
        architecture: one of `ARCHITECTURES`. gemma2 and gemma3 alternate sliding (64 tokens) and full attention, and
            get twice `num_layers` so that `num_layers` of them are full.
        rope: one of `ROPES`, see `COMBINATIONS`; the original length of a stretched one is `positions` / 4.
        groups: query heads per KV head.
        head_dim: channels of a head, even.
        num_kv_heads: KV heads of a layer.
        num_layers: full-attention layers.
        hidden_size: width of the residual stream; None takes about 48, as the number of heads allows.
        positions: longest sequence.
        spread: standard deviation of the weights at a width of 48; a wider model gets less, to stay as peaked.
        seed: of the weights; the caller's random state is left as it was.
        dtype: of the weights.
        settings: further fields of the configuration.
    """
    sliding = architecture in ("gemma2", "gemma3")
    layers = num_layers * 2 if sliding else num_layers
    num_heads = num_kv_heads * groups
    if hidden_size is None:
        # phi3 derives the length of its RoPE factors from this width.
        hidden_size = num_heads * head_dim if architecture == "phi3" else num_heads * -(-48 // num_heads)
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size * 2,
        "num_hidden_layers": layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "initializer_range": spread * (48 / hidden_size) ** 0.5,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    parameters = _rope_parameters(rope, head_dim, positions)
    values["rope_parameters"] = parameters
    if architecture == "mistral":
        values["sliding_window"] = None
    if sliding:
        values["layer_types"] = ["sliding_attention", "full_attention"] * num_layers
        values["sliding_window"] = 64
        values["query_pre_attn_scalar"] = head_dim
    if architecture == "gemma3":
        plain = {"rope_type": "default", "rope_theta": 1e4}
        values["rope_parameters"] = {"sliding_attention": plain, "full_attention": parameters}
    if architecture == "phi3":
        values["original_max_position_embeddings"] = positions // 4
    values.update(settings)
    config = _CONFIGS[architecture](**values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    # The test of one model's answer must not end early because a random model said so.
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = EOS
    return model.to(dtype).eval()


def _rope_parameters(rope: str, head_dim: int, positions: int) -> dict[str, Any]:
    original = positions // 4
    base: dict[str, Any] = {"rope_type": rope, "rope_theta": 1e4}
    pairs = head_dim // 2
    match rope:
        case "default":
            return base
        case "linear":
            return base | {"factor": 4.0}
        case "llama3":
            return base | {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
        case "yarn":
            return base | {"factor": 4.0, "original_max_position_embeddings": original}
        case "longrope":
            return base | {
                "factor": 4.0,
                "short_factor": [1.0 + 0.05 * i for i in range(pairs)],
                "long_factor": [1.5 + 0.25 * i for i in range(pairs)],
                "original_max_position_embeddings": original,
            }
    raise ValueError(f"rope must be one of {ROPES}, got {rope!r}")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes, `<s>` and `</s>`: any text goes there and back; token ids equal byte codes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = {letter: _byte_of(letter) for letter in alphabet}
    vocab = letters | {"<s>": BOS, "</s>": EOS, "<unused0>": EOS + 1, "<unused1>": EOS + 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template=(
            "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
            "{% if add_generation_prompt %}<s>assistant: {% endif %}"
        ),
    )


def _byte_of(letter: str) -> int:
    """The byte that the byte-level alphabet shows as `letter`."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [code for code in range(256) if code not in shown]
    return ord(letter) if ord(letter) in shown else hidden[ord(letter) - 256]


def tiny_loaded(architecture: str = "llama", **settings: Any) -> LoadedModel:
    """A `LoadedModel` over `tiny_model(architecture, **settings)` and `tiny_tokenizer()`."""
    model = tiny_model(architecture, **settings)
    return LoadedModel(
        model=model,
        tokenizer=tiny_tokenizer(),
        name=f"tiny-{architecture}",
        label=f"Tiny {architecture}",
        device="cpu",
        dtype=str(model.dtype).removeprefix("torch."),
        fingerprint=fingerprint(model),
        max_positions=max_positions(model.config),
    )
