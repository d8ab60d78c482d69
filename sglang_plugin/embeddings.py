"""MooncakeEmbeddings: SGLang's encoder cache (embeddings of images and audio, by the hash of their content) on the node.

Promises: an embedding comes back only for the same content hash, size, dtype and model (SGLang's own keys have the hash alone), whole and
with its checksums right, or not at all. The engine's memory of one that is reported missing holds anything.

An embedding is stored as its size in 8 bytes and its bytes, in pages of a namespace of its own, PAGE_BYTES each, the last one padded; so it
lies in the same memory, and obeys the same limits and deadlines, as KV does.
"""

from __future__ import annotations

import ctypes
import logging
import uuid
from collections.abc import Callable, Sequence
from hashlib import sha256

import numpy as np
import torch
from sglang.srt.mem_cache.embedding_store import EmbeddingStore

from ..common.config import load_config
from ..common.errors import UnsupportedError
from ..common.identity import ITEM_BYTES, KVNamespace, trailer_key
from ..common.node.client import NodeClient
from ..common.node.protocol import Rectangle
from ..common.page import PageLayout
from ..connectors.hicache import HiCacheStore
from ..connectors.model import local_weights, namespace_of_model
from . import compat

logger = logging.getLogger("mooncake_kv.sglang")

PAGE_BYTES = 1 << 20
_WIDTH = 4096  # items in a row of a page; says nothing about the embeddings'
NODE_START_S = 15.0


class MooncakeEmbeddings(EmbeddingStore):
    """`--mm-global-cache-backend mooncake` where the file or the environment has a key of ours."""

    def __init__(self) -> None:
        compat.require(compat.EMBEDDINGS)
        self.config = load_config()
        self._client: NodeClient | None = None
        self._store: HiCacheStore | None = None

    def register_buffer(self, tensor: torch.Tensor) -> None:
        """SGLang does so before anything else, and that is how the dtype becomes known. Raises UnsupportedError for one we cannot store."""
        namespace = self._namespace(str(tensor.dtype).removeprefix("torch."))
        if self._store is not None:
            return  # its pools have one dtype
        layout = PageLayout(namespace, trailer_key(self.config.pool_secret))
        self._client = NodeClient(self.config, namespace, engine=f"sglang-encoder-{uuid.uuid4().hex}", role="worker")
        self._client.start()
        if not self._client.wait_ready(NODE_START_S):
            logger.warning("the encoder starts without its cache, which joins when it can: %s", self._client.reason)
        self._store = HiCacheStore(
            self._client,
            Runs([]),
            layout,
            digest=namespace.digest(self.config.pool_secret),
            rectangle=Rectangle(0, 1, 0, 1),
            writes=True,
            verify=True,
            timeout_s=self.config.fetch_timeout_ms / 1e3,
            staged_bytes=self.config.staging_window,
        )

    def _namespace(self, dtype: str) -> KVNamespace:
        if dtype not in ITEM_BYTES:
            raise UnsupportedError(f"mooncake-kv does not store embeddings of dtype {dtype}")
        model, chosen = compat.model_config(), compat.settings("model")
        return namespace_of_model(
            self.config,
            model.hf_config,
            lambda: local_weights(model.model_path, model.revision, chosen.download_dir),
            compute_dtype=str(model.dtype),
            max_model_len=model.context_len,
            quantization=f"sglang {model.quantization}" if model.quantization else "",
            load_format=str(chosen.load_format),
            page_tokens=PAGE_BYTES // ITEM_BYTES[dtype] // _WIDTH,
            kv_dtype=dtype,
            num_layers=1,
            num_kv_heads=1,
            k_head_dim=_WIDTH,
            v_head_dim=0,
            mla=True,
            variant="sglang encoder output",
        )

    # ---- SGLang's thread ---------------------------------------------------------------------------------------------------------

    def batch_is_exist(self, hashes: list[str]) -> list[bool]:
        """By the first page, which also says how large the embedding is; SGLang does not. Whoever finds less then, computes."""
        return [self._store is not None and self._store.exists(pages_of(name, 1)) == 1 for name in hashes]

    def batch_get(self, hashes: list[str], ptrs: list[int], sizes: list[int]) -> list[bool]:
        return self.batch_get_into_multi_buffers(hashes, [[ptr] for ptr in ptrs], [[size] for size in sizes])

    def batch_put(self, hashes: list[str], ptrs: list[int], sizes: list[int]) -> list[bool]:
        return self.batch_put_from_multi_buffers(hashes, [[ptr] for ptr in ptrs], [[size] for size in sizes])

    def batch_get_into_multi_buffers(self, hashes: list[str], ptrs: list[list[int]], sizes: list[list[int]]) -> list[bool]:
        """One embedding lies in several pieces of memory, one after the other."""
        found = []
        for name, pieces in self._each(hashes, ptrs, sizes):
            pages, slots = pages_of(name, pieces.pages), pieces.slots()
            found.append(self._store is not None and self._store.get(pages, slots, pieces) == len(pages))
        return found

    def batch_put_from_multi_buffers(self, hashes: list[str], ptrs: list[list[int]], sizes: list[list[int]]) -> list[bool]:
        return [
            self._store is not None and all(self._store.set(pages_of(name, pieces.pages), pieces.slots(), pieces))
            for name, pieces in self._each(hashes, ptrs, sizes)
        ]

    def _each(self, hashes: list[str], ptrs: list[list[int]], sizes: list[list[int]]) -> list[tuple[str, Runs]]:
        rows = self._store.page_tokens if self._store is not None else 1
        return [(name, Runs(list(zip(p, s, strict=True)), rows)) for name, p, s in zip(hashes, ptrs, sizes, strict=True)]

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        if self._client is not None:
            self._client.close()


class Runs:
    """Pieces of memory, (address, bytes) each, seen as pages one after another, after their size: what a BoundView is to KV."""

    def __init__(self, pieces: Sequence[tuple[int, int]], rows: int = 1) -> None:
        size = sum(size for _, size in pieces)
        self._size = np.frombuffer(bytearray(size.to_bytes(8, "little")), np.uint8)
        self._memory = [self._size, *(np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(ptr)) for ptr, n in pieces if n)]
        self._rows = rows
        self.pages = -(-(8 + size) // PAGE_BYTES)

    def slots(self) -> np.ndarray:
        """As the store counts: rows of pages."""
        return np.arange(self.pages * self._rows)

    def gather(self, token_slots: np.ndarray, first_token: int, pages: Sequence[np.ndarray]) -> None:
        for number, page in zip(token_slots[:: self._rows] // self._rows, pages, strict=True):
            filled = self._copy(int(number), page, False)
            page[filled:PAGE_BYTES] = 0

    def scatter(
        self, token_slots: np.ndarray, first_token: int, pages: Sequence[np.ndarray], check: Callable[[int], bool] | None = None
    ) -> int:
        for i, (number, page) in enumerate(zip(token_slots[:: self._rows] // self._rows, pages, strict=True)):
            if (check is not None and not check(i)) or (number == 0 and not np.array_equal(page[:8], self._size)):
                return i
            self._copy(int(number), page, True)
        return len(pages)

    def close(self) -> None:
        return

    def _copy(self, number: int, page: np.ndarray, out: bool) -> int:
        """Between page `number` of the pieces and a page in the node's memory. Returns how many bytes."""
        skip, at = number * PAGE_BYTES, 0
        for memory in self._memory:
            if skip >= len(memory):
                skip -= len(memory)
                continue
            part = memory[skip : skip + PAGE_BYTES - at]
            if out:
                part[:] = page[at : at + len(part)]
            else:
                page[at : at + len(part)] = part
            at, skip = at + len(part), 0
            if at == PAGE_BYTES:
                break
        return at


def pages_of(name: str, count: int) -> list[bytes]:
    """Page hashes of an embedding of so many pages whose content has this hash."""
    key = name.encode()
    start = b"mooncake-kv-embedding-v1" + len(key).to_bytes(8, "little") + key
    return [sha256(start + i.to_bytes(8, "little")).digest() for i in range(count)]
