"""Distribution mooncake-kv: each top-level folder of code is a subpackage of `mooncake_kv`, in wheels and editable installs alike."""

from pathlib import Path

from setuptools import find_packages, setup

FOLDERS = ("common", "connectors", "vllm_plugin", "sglang_plugin", "lmdeploy_plugin")
PACKAGES = [f"mooncake_kv.{name}" for folder in FOLDERS for name in (folder, *(f"{folder}.{sub}" for sub in find_packages(folder)))]
VLLM = "vllm>=0.32,<0.33"
MOONCAKE = "0.3.13.post1"

setup(
    name="mooncake-kv",
    version="0.1.0",
    description="Keeps and shares the KV cache of long prompts between requests, restarts and engines",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=PACKAGES,
    package_dir={"mooncake_kv": "."},
    package_data={"mooncake_kv.common": ["demo/*.txt", "demo/*.md"]},
    install_requires=[
        "aiohttp>=3.11",
        "msgspec>=0.19",
        "numpy>=1.26",
        "prometheus_client>=0.21",
        "rich>=13.9",
        "typer>=0.15",
        "uvloop>=0.21",
        "xxhash>=3.5",
    ],
    # One engine an environment is the normal case: the three engines pin different versions of torch.
    extras_require={
        "vllm": [VLLM],
        "sglang": ["sglang==0.5.23"],
        "lmdeploy": ["lmdeploy>=0.18,<0.19"],
        # Exactly one of these: all install the same module.
        "cuda12": [f"mooncake-transfer-engine=={MOONCAKE}"],
        "cuda13": [f"mooncake-transfer-engine-cuda13=={MOONCAKE}"],
        "cpu": [f"mooncake-transfer-engine-non-cuda=={MOONCAKE}"],
        "npu": [f"mooncake-transfer-engine-npu=={MOONCAKE}"],
        "rocm": [f"mooncake-transfer-engine-rocm=={MOONCAKE}"],
        "test": ["hypothesis>=6.120", "mypy==1.19.1", "psutil>=6", "pytest>=8.3", "pytest-timeout>=2.3", "ruff==0.15.0"],
    },
    entry_points={
        "console_scripts": ["mooncake-kv = mooncake_kv.common.cli:app"],
        "vllm.general_plugins": ["mooncake_kv = mooncake_kv.vllm_plugin:register"],
        "sglang.srt.plugins": ["mooncake_kv = mooncake_kv.sglang_plugin:register"],
        # LMDeploy loads no plugins; PyTorch calls this at the end of `import torch`, in every program.
        "torch.backends": ["mooncake_kv = mooncake_kv.lmdeploy_plugin.autoload:load"],
    },
)
