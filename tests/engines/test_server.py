"""Whole servers, started with the command lines that users type, over the OpenAI-compatible API."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.harness import Server
from tests.models import generated_llama

PROMPT = "The quick brown fox jumps over the lazy dog. " * 60


def ask(server: Server, prompt: str = PROMPT) -> tuple[str, int]:
    """(text, prompt tokens that were not computed)."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = server.post("/v1/completions", body)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    ("module", "servers"),
    [(True, 1), (False, 2)],
    ids=["python -m vllm.entrypoints.openai.api_server", "vllm serve with two API servers"],
)
def test_the_users_command_line(runtime_dir: Path, tmp_path: Path, module: bool, servers: int) -> None:
    model = str(generated_llama())
    words = ["--model", model] if module else [model, "--api-server-count", str(servers)]
    words += ["--kv-connector", "mooncake", "--moon-cache-config", '{"kind": "Store"}', "--enforce-eager"]
    rest = ["--served-model-name", "m", "--max-model-len", "2048", "--block-size", "64", "--enable-prompt-tokens-details"]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "MOONCAKE_DRAM_SIZE": "256mb", "MOONCAKE_FETCH_TIMEOUT_MS": "5000"}
    with Server([*words, *rest], tmp_path / "log", module=module, environment=environment) as server:
        assert ask(server)[1] == 0
        local = ask(server)
        assert local[1] >= 512
        for _ in range(2 * servers):  # with two API servers, both get requests
            assert server.post("/reset_prefix_cache", {})["success"]
            assert ask(server) == local
        assert "vllm:mooncake_kv_tokens_total" in server.get("/metrics")
