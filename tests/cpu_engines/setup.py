"""Test-only distribution: what makes the engines run on a CPU the way they run elsewhere. Never installed for a user."""

from setuptools import setup

setup(
    name="mooncake-kv-cpu-engines",
    version="0",
    packages=["mooncake_kv_cpu_engines"],
    python_requires=">=3.11",
    entry_points={
        "vllm.general_plugins": ["mooncake_kv_cpu_engines = mooncake_kv_cpu_engines.vllm:register"],
        "sglang.srt.plugins": ["mooncake_kv_cpu_engines = mooncake_kv_cpu_engines.sglang:register"],
        "torch.backends": ["mooncake_kv_cpu_engines = mooncake_kv_cpu_engines.lmdeploy:load"],
    },
)
