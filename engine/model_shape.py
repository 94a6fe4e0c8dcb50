"""Shape of a model's keys and values, for byte figures before any cache is built."""

from __future__ import annotations

import torch

from engine.budget import KVShape
from engine.config import QEvictConfig
from engine.models import LoadedModel


def model_shape(loaded: LoadedModel, config: QEvictConfig) -> KVShape:
    """Shape of all layers of a model as byte figures need it, in the dtype that `config` stores."""
    text = loaded.model.config.get_text_config(decoder=True)
    stored = loaded.dtype if config.kv_dtype == "model" else config.kv_dtype
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return KVShape(int(text.num_hidden_layers), heads, dim, getattr(torch, stored).itemsize)
