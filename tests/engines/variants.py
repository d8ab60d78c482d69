"""Checkpoints that differ from an ordinary one in a single respect, and LoRA adapters: made by the tests that need them, in their folder.

Weights are random, so texts say nothing; every folder has SmolLM2's tokenizer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.models import SMOLLM2


def copied(model: Path, folder: Path, change: Callable[[dict[str, Any]], None] | None = None) -> Path:
    """Another folder with the same files; `change` gets the tensors by name and may edit them in place."""
    shutil.copytree(model, folder)
    if change is not None:
        from safetensors.torch import load_file, save_file

        (weights,) = folder.glob("*.safetensors")
        tensors = load_file(weights)
        change(tensors)
        save_file(tensors, weights, {"format": "pt"})
    return folder


def one_tensor(tensors: dict[str, Any]) -> None:
    """A fine-tune that touched one matrix."""
    tensors["model.layers.1.self_attn.k_proj.weight"] *= 1.01


def one_weight(tensors: dict[str, Any]) -> None:
    """One element changed, away from the windows that a sampled fingerprint reads (they lie at fixed relative offsets)."""
    flat = tensors["model.layers.1.mlp.gate_proj.weight"].view(-1)
    flat[flat.numel() // 5] += 1


def written(config: Any, folder: Path, *, dtype: str = "bfloat16", seed: int = 0) -> Path:
    """A checkpoint of this transformers configuration with seeded random weights; the vocabulary becomes SmolLM2's."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

    tokens = LlamaConfig.from_pretrained(SMOLLM2)
    config.vocab_size, config.bos_token_id, config.eos_token_id = tokens.vocab_size, tokens.bos_token_id, tokens.eos_token_id
    config.pad_token_id = tokens.pad_token_id
    set_seed(seed)
    AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).save_pretrained(folder)
    add_tokenizer(folder)
    return folder


def add_tokenizer(folder: Path) -> None:
    for file in SMOLLM2.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)


def adapter(folder: Path, model: Path, *, seed: int, rank: int = 8) -> Path:
    """A LoRA adapter in PEFT's format, with random matrices on the query, key and value projections of every layer."""
    import torch
    from safetensors.torch import load_file, save_file

    (weights,) = model.glob("*.safetensors")
    targets = ["q_proj", "k_proj", "v_proj"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in load_file(weights).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            for part, shape in (("A", (rank, tensor.shape[1])), ("B", (tensor.shape[0], rank))):
                matrix = torch.randn(shape, generator=generator) * 0.05
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = matrix.to(tensor.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    settings |= {"lora_dropout": 0.0, "bias": "none", "base_model_name_or_path": "", "inference_mode": True}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def tiny_llava(folder: Path, image_tokens: int) -> Path:
    """A vision-language model: `image_tokens` placeholders (a square number) an image of 64 x 64 pixels."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import (
        AutoTokenizer,
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        set_seed,
    )

    patch = 64 // int(image_tokens**0.5)
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    text = LlamaConfig(
        vocab_size=len(tokenizer) + 63,
        num_hidden_layers=4,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=64,
        patch_size=patch,
        projection_dim=64,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=image_tokens,
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
    )
    set_seed(0)
    LlavaForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    # vLLM knows the vision tower's tensors by the names that transformers before 5 gave them.
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    save_file({name.replace("vision_tower.", "vision_tower.vision_model."): t for name, t in tensors.items()}, weights, {"format": "pt"})
    LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64}),
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder


_ATTENTION: dict[str, Any] = {
    "hidden_size": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def sliding_mistral(folder: Path) -> Path:
    """Every layer sees the last 256 tokens only."""
    from transformers import MistralConfig

    return written(MistralConfig(sliding_window=256, **_ATTENTION), folder)


def hybrid_gemma(folder: Path) -> Path:
    """Layers with and without a sliding window."""
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"] * 2
    return written(Gemma3TextConfig(sliding_window=256, layer_types=kinds, **_ATTENTION), folder)


def mamba(folder: Path) -> Path:
    """No attention at all."""
    from transformers import MambaConfig

    return written(MambaConfig(num_hidden_layers=2, state_size=16, hidden_size=256), folder)
