"""Page hashes: one chained sha256 for each full page of a prompt, by the rule that SGLang uses for its storage keys.

    h[i] = sha256((h[i-1] or seed) || tokens of page i as uint32, little-endian)

The seed is empty, or `storage_namespace_seed(extra_key, cache_salt)`. SGLang hands its storage hashes and not tokens, so a prompt has the
same page hashes in every engine only if all follow its rule to the byte.

Promises:
- A hash depends on the seed and on all tokens up to the end of its page, and on nothing else, however they were split over `extend` calls.
- A page with extras (multimodal ids, prompt embeddings, which tokens do not identify) never has the hash input of a page without, nor of a
  page with other extras. Its input is `prior || tokens || len(extras) as 8 bytes || extras || padding` with `prior` 32 zero bytes at the
  start of an unseeded chain, and the padding brings its length to 2 modulo 4: plain inputs have a multiple of 4, and the wide pages of
  SGLang (tokens above 2^32-1, which it uses as multimodal placeholders and we refuse) an odd length. Such pages, and all after them, belong
  to one engine.
- `extend` converts and hashes only what is new.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha256

import numpy as np

HASH_BYTES = 32
TOKEN_LIMIT = 1 << 32

Tokens = Sequence[int] | np.ndarray


def storage_namespace_seed(extra_key: str | None, cache_salt: str | None) -> bytes:
    """The seed of a request's chain (32 bytes), or b"" when it has neither an extra key (LoRA) nor a salt. An empty string is not None."""
    if extra_key is None and cache_salt is None:
        return b""
    digest = sha256(b"sglang-cache-namespace-v1")
    for part in (extra_key, cache_salt):
        if part is None:
            digest.update(b"\0")
        else:
            text = part.encode()
            digest.update(b"\1" + len(text).to_bytes(8, "little") + text)
    return digest.digest()


class PageHasher:
    """The chain of one request.

    `hashes` has 32 bytes for each full page, `tokens` counts all tokens seen. `seed` is b"" or 32 bytes.
    """

    __slots__ = ("_extras", "_page_bytes", "_prior", "_rest", "hashes", "page_tokens", "tokens")

    def __init__(self, page_tokens: int = 64, seed: bytes = b"") -> None:
        if page_tokens < 1:
            raise ValueError(f"page_tokens must be at least 1, not {page_tokens}")
        if len(seed) not in (0, HASH_BYTES):
            raise ValueError(f"a seed has 0 or {HASH_BYTES} bytes, not {len(seed)}")
        self.page_tokens = page_tokens
        self.tokens = 0
        self.hashes: list[bytes] = []
        self._page_bytes = 4 * page_tokens
        self._prior = seed
        self._rest = b""
        self._extras: dict[int, bytes] = {}

    def extend(self, tokens: Tokens, extras: Mapping[int, bytes] | None = None) -> None:
        """Append tokens, and hash the pages that they complete.

        `extras` maps page indices of the whole chain to bytes; they may come before their page is complete, not after. Raises ValueError
        for a token outside uint32 and for extras that come too late or contradict earlier ones; nothing has changed then.
        """
        data = _uint32_bytes(tokens)
        if extras:
            for index, extra in extras.items():
                if index < len(self.hashes):
                    raise ValueError(f"extras for page {index} come after its hash was computed")
                if self._extras.get(index, extra) != extra:
                    raise ValueError(f"page {index} already has other extras")
            self._extras.update((index, bytes(extra)) for index, extra in extras.items())
        self.tokens += len(data) // 4
        if self._rest:
            data = self._rest + data
        size = self._page_bytes
        end = len(data) - len(data) % size
        if end:
            pending, prior, hashes = self._extras, self._prior, self.hashes
            for start in range(0, end, size):
                page = data[start : start + size]
                if pending and len(hashes) in pending:
                    prior = sha256(_with_extras(prior, page, pending.pop(len(hashes)))).digest()
                else:
                    prior = sha256(prior + page).digest()
                hashes.append(prior)
            self._prior = prior
        self._rest = data[end:]


def page_hashes(tokens: Tokens, page_tokens: int = 64, seed: bytes = b"") -> list[bytes]:
    """Hashes of the full pages of a prompt, 32 bytes each."""
    hasher = PageHasher(page_tokens, seed)
    hasher.extend(tokens)
    return hasher.hashes


def _with_extras(prior: bytes, page: bytes, extra: bytes) -> bytes:
    body = b"".join((prior or bytes(HASH_BYTES), page, len(extra).to_bytes(8, "little"), extra))
    return body + bytes((2 - len(body)) % 4 or 4)


def _uint32_bytes(tokens: Tokens) -> bytes:
    """Little-endian uint32 bytes of the tokens. A list costs 4 ns a token, an array of 4-byte unsigned integers next to nothing."""
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens must be a one-dimensional array of integers, not {tokens.dtype} of shape {tokens.shape}")
        if tokens.dtype != np.uint32 and tokens.size:
            for bound in (int(tokens.min()), int(tokens.max())):
                if not 0 <= bound < TOKEN_LIMIT:
                    raise ValueError(_outside(bound))
        return tokens.astype("<u4", copy=False).tobytes()
    try:
        packed = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
    except (OverflowError, TypeError):
        for token in tokens:
            if not isinstance(token, (int, np.integer)):
                raise ValueError(f"token {token!r} is not an integer") from None
            if not 0 <= token < TOKEN_LIMIT:
                raise ValueError(_outside(token)) from None
        raise
    if sys.byteorder == "big":
        packed = array("I", packed)
        packed.byteswap()
    return packed.tobytes()


def _outside(token: int) -> str:
    return f"token {token} does not fit in 32 unsigned bits"
