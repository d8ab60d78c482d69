"""Small models for tests: ordinary Hugging Face checkpoints below the cache folder, made once and the same on every machine.

`generated_llama` has random weights, so its texts say nothing; it is for bytes, layouts and tensor parallelism. SmolLM2 is for texts.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import sys
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
    name = hashlib.sha256(msgspec.json.encode(shape) + Path(__file__).read_bytes()).hexdigest()[:12]
    folder = _BASE.parent / "models" / f"llama-{shape.layers}x{shape.kv_heads}x{shape.head_dim}-{shape.seed}-{name}"
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            _write(partial, shape)
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
    for file in SMOLLM2.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)
