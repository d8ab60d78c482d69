"""Small models for tests: ordinary Hugging Face checkpoints below the cache folder, made once and the same on every machine.

`generated_llama` and `generated_mla` have random weights, so their texts say nothing; they are for bytes, layouts and tensor parallelism.
SmolLM2 is for texts.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

# In the CPU environment the checkpoint lies beside the packages (tests/env/build.py).
_BASE = next(Path(p).parents[2] for p in sys.path if p.endswith("site-packages") and (Path(p).parents[2] / "smollm2").is_dir())
SMOLLM2 = _BASE / "smollm2"


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a generated Llama; the vocabulary is SmolLM2's."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    rope_theta: float = 10000.0
    seed: int = 0


# A page of the default 64 tokens is one object.
TINY_LLAMA = Shape(layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32)
# 4 KiB a token and head: one object per head with pages of 256 tokens, one for all four heads with the default 64.
WIDE_LLAMA = Shape(layers=8, hidden=512, heads=8, kv_heads=4, head_dim=128)


def generated_llama(shape: Shape = TINY_LLAMA) -> Path:
    """Folder of a checkpoint with these sizes and seeded random weights, with SmolLM2's tokenizer."""
    name = f"llama-{shape.layers}x{shape.kv_heads}x{shape.head_dim}-{shape.seed}"
    return _made(f"{name}-{_digest(msgspec.json.encode(shape))}", lambda folder: _write(folder, shape))


def generated_mla() -> Path:
    """Likewise of a DeepSeek V2 without experts: MLA, with latents of 64 and 16 dimensions for positions."""
    return _made(f"mla-{_digest(b'')}", _write_mla)


def _digest(more: bytes) -> str:
    return hashlib.sha256(more + Path(__file__).read_bytes()).hexdigest()[:12]


def _made(name: str, write: Callable[[Path], None]) -> Path:
    folder = _BASE.parent / "models" / name
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            write(partial)
            partial.rename(folder)
    return folder


def _write(folder: Path, shape: Shape) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(shape.seed)
    vocabulary = LlamaConfig.from_pretrained(SMOLLM2)
    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        vocab_size=vocabulary.vocab_size,
        bos_token_id=vocabulary.bos_token_id,
        eos_token_id=vocabulary.eos_token_id,
    )
    LlamaForCausalLM(config).to(getattr(torch, shape.dtype)).save_pretrained(folder)
    _add_tokenizer(folder)


def _write_mla(folder: Path) -> None:
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, LlamaConfig, set_seed

    set_seed(0)
    vocabulary = LlamaConfig.from_pretrained(SMOLLM2)
    layers = 3
    # SGLang computes DeepSeek's positions on a CPU only with YaRN.
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 4096}
    config = DeepseekV2Config(
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        max_position_embeddings=8192,
        rope_parameters={**yarn, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
        vocab_size=vocabulary.vocab_size,
        bos_token_id=vocabulary.bos_token_id,
        eos_token_id=vocabulary.eos_token_id,
    )
    DeepseekV2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "moe_layer_freq": 1}))  # engines want it, transformers drops it
    _add_tokenizer(folder)


def _add_tokenizer(folder: Path) -> None:
    for file in SMOLLM2.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)
