"""A process whose memory others read: prints its endpoint as JSON, then answers `fill SEED` and `where` on its standard input."""

from __future__ import annotations

import json
import sys

import numpy as np

from mooncake_kv.common.config import load_config
from mooncake_kv.connectors.migration import Link, Transfer


def content(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def main() -> None:
    length = int(sys.argv[1])
    memory = content(0, length)
    link = Link(Transfer(load_config({}), "127.0.0.1"), "reader")
    link.add("0", memory.ctypes.data, length)
    print(json.dumps(link.endpoint()), flush=True)
    for line in sys.stdin:
        memory[:] = content(int(line), length)
        print("done", flush=True)


if __name__ == "__main__":
    main()
