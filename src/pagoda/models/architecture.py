"""`Architecture`: everything about one architecture, said in its file of this folder.

Tensors have GGUF's names in programs. A name map says where a file keeps them: a pattern of the file's name
to one of the program's, without `.weight` or `.bias`; `{i}` is the number of the layer, `{e}` of the
expert. Several names on the right lie one after the other in the rows of the file's tensor, and so do all
experts where only the right side has `{e}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from pagoda.models.config import ModelConfig

if TYPE_CHECKING:
    from pagoda.runtime.program import Program
    from pagoda.weights.settings import Settings

NameMap: TypeAlias = dict[str, str | tuple[str, ...]]
Configure: TypeAlias = "Callable[[Settings, ModelConfig], ModelConfig]"

# Hugging Face's names of what most architectures have.
HF_TENSORS: NameMap = {
    "model.embed_tokens": "token_embd",
    "model.layers.{i}.input_layernorm": "blk.{i}.attn_norm",
    "model.layers.{i}.self_attn.q_proj": "blk.{i}.attn_q",
    "model.layers.{i}.self_attn.k_proj": "blk.{i}.attn_k",
    "model.layers.{i}.self_attn.v_proj": "blk.{i}.attn_v",
    "model.layers.{i}.self_attn.o_proj": "blk.{i}.attn_output",
    "model.layers.{i}.post_attention_layernorm": "blk.{i}.ffn_norm",
    "model.layers.{i}.mlp.gate_proj": "blk.{i}.ffn_gate",
    "model.layers.{i}.mlp.up_proj": "blk.{i}.ffn_up",
    "model.layers.{i}.mlp.down_proj": "blk.{i}.ffn_down",
    "model.norm": "output_norm",
    "lm_head": "output",
}
QK_NORM: NameMap = {
    "model.layers.{i}.self_attn.q_norm": "blk.{i}.attn_q_norm",
    "model.layers.{i}.self_attn.k_norm": "blk.{i}.attn_k_norm",
}


def unchanged(settings: Settings, config: ModelConfig) -> ModelConfig:
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How a model is computed, and what its files do differently.

    `from_gguf` and `from_hf` take what the keys that all architectures share say, and return it changed by
    the architecture's own keys, which they read from the settings (metadata keys after `<arch>.`, or
    config.json). Keys that would change the result and that nobody reads are refused.
    `interleaved_rope`: rows of attn_q and attn_k of GGUF files pair rotary dimension 2i with 2i + 1.
    `hf_defaults` holds keys that config.json may leave out, for which transformers has a value.
    `hf_norm_offset` is added to the norm weights of Hugging Face files (Gemma computes x * (1 + weight)).
    `hf_transposed`: matrices whose rows are inputs in Hugging Face files, by their patterns there.
    `hf_ignored`: beginnings of names that belong to another model in the same file (a vision tower).
    """

    build: Callable[[ModelConfig], Program]
    from_gguf: Configure = unchanged
    from_hf: Configure = unchanged
    gguf_tensors: NameMap = field(default_factory=dict)  # names that differ from the program's
    hf_tensors: NameMap = field(default_factory=lambda: HF_TENSORS)
    interleaved_rope: bool = False
    hf_defaults: Mapping[str, object] = field(default_factory=dict)
    hf_norm_offset: float = 0.0
    hf_transposed: tuple[str, ...] = ()
    hf_ignored: tuple[str, ...] = ()
