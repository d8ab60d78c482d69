"""Time to the first token in LMDeploy on a CPU: a prompt of about 3,000 tokens cold, from the cache, and from LMDeploy's own prefix cache.

One engine with the connector and prefix caching, SmolLM2, one request at a time, as the median of the rounds; each round has a prompt of
its own. The CPU's attention is plain torch (tests only), so absolute times say nothing about GPUs. `python benchmarks/lmdeploy_ttft.py
[--json FILE]`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TOKENS = 3020
ROUNDS = 3
SETTINGS = {"dram_size": "1gb", "idle_exit_s": 5}
PROBES = "tests.engines.lmdeploy_probes:"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mkv-", dir="/tmp") as folder:
        os.environ["XDG_RUNTIME_DIR"] = os.environ["MOONCAKE_KV_TEST_RUN"] = folder
        times = measure(Path(folder))
    medians = {name: round(statistics.median(values), 4) for name, values in times.items()}
    for name, value in medians.items():
        print(f"{name:12} {value:8.3f} s   {medians['cold'] / value:6.1f} x")
    if arguments.json:
        arguments.json.write_text(json.dumps({"tokens": TOKENS, "rounds": ROUNDS, "ttft_s": medians}, indent=1) + "\n")


def measure(folder: Path) -> dict[str, list[float]]:
    """Seconds of each round."""
    from mooncake_kv.common.hashing import page_hashes
    from mooncake_kv.common.identity import KVNamespace
    from tests.engines.judge import PageReader
    from tests.engines.lmdeploy_harness import LMDeployEngine
    from tests.engines.test_vllm_hits import random_ids
    from tests.models import SMOLLM2

    times: dict[str, list[float]] = {"cold": [], "loaded": [], "local hit": []}
    with LMDeployEngine(SMOLLM2, folder / "log", settings=SETTINGS, enable_prefix_caching=True) as engine:
        space = KVNamespace.decode(bytes.fromhex(engine.call(f"{PROBES}namespace")))
        with PageReader(space, SETTINGS) as reader:
            engine.generate(random_ids(200, 0), 4)
            for round_ in range(ROUNDS):
                prompt = random_ids(TOKENS, 1 + round_)
                for name, reused in (("cold", 0), ("loaded", TOKENS // 64 * 64), ("local hit", TOKENS // 64 * 64)):
                    result = engine.generate(prompt, 4, sampling={"ignore_eos": True})
                    assert result.cached == reused and result.ttft_s is not None, result
                    times[name].append(result.ttft_s)
                    if name == "cold":
                        assert reader.wait_for(page_hashes(prompt)) == TOKENS // 64
                        engine.call(f"{PROBES}forget")
    return times


if __name__ == "__main__":
    main()
