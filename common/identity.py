"""KVNamespace: everything that must be equal for the KV bytes of two engines to be interchangeable.

Promises: any difference in any field changes the digest, and so every key. Nothing of who wrote the bytes (rank, host, TP size, engine) is
in it, except in `variant` where bytes are not portable. Two engines derive the same namespace from the same model facts without
configuration. `decode` accepts only what `encode` can have produced, within bounds that make every derived size safe to compute with: a
hostile peer may have sent it.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import NoReturn

import msgspec

from .secret import Secret

SCHEMA = 1
LAYOUT_MHA = "layer,kv,token,head,dim"
LAYOUT_MLA = "layer,token,dim"
# int8 and int4 are bytes of packed values and of the scales and zero points behind them: dims count these bytes.
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "int4": 1}
# An object smaller than this is dominated by the cost per object of the slow tiers (TCP: 45-70 us a fragment).
MIN_OBJECT_BYTES = 1 << 20
MAX_PAGE_BYTES = 1 << 34
MAX_OBJECTS = 4096
TRAILER_KEY_BYTES = 32

_LIMITS = {
    "page_tokens": (1, 4096),
    "num_layers": (1, 1024),
    "num_kv_heads": (1, 1024),
    "k_head_dim": (1, 8192),
    "v_head_dim": (0, 8192),
    "heads_per_group": (1, 1024),
    "layers_per_group": (1, 1024),
}
_TEXT_LIMITS = {"model": (1, 128), "tenant": (1, 128), "weights_epoch": (0, 128), "variant": (0, 1024)}


class KVNamespace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity of one set of keys. The order and the names of the fields are part of the encoding: any change needs another SCHEMA.

    `model` is the fingerprint in hex, `kv_dtype` the logical storage type, head counts and dims are those of the whole model, not of a
    rank. MLA: one KV head, `k_head_dim` is the latent plus the RoPE part, `v_head_dim` 0. Raises ValueError naming the field that is out of
    bounds.
    """

    schema: int
    model: str
    kv_dtype: str
    page_tokens: int
    num_layers: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    mla: bool
    heads_per_group: int
    layers_per_group: int
    object_layout: str
    tenant: str
    weights_epoch: str
    variant: str = ""

    @classmethod
    def build(
        cls,
        *,
        model: str,
        kv_dtype: str,
        num_layers: int,
        num_kv_heads: int,
        k_head_dim: int,
        v_head_dim: int,
        mla: bool = False,
        page_tokens: int = 64,
        layers_per_group: int = 0,
        tenant: str = "default",
        weights_epoch: str = "",
        variant: str = "",
    ) -> KVNamespace:
        """Fill in what follows from the model's facts. `layers_per_group` 0 means all layers, as does any number above `num_layers`.

        Heads per group is the smallest divisor of the KV heads whose object has at least 1 MiB; if none reaches it, all heads.
        """
        layers = min(layers_per_group, num_layers) or num_layers
        heads = num_kv_heads
        head_bytes = layers * page_tokens * (k_head_dim + v_head_dim) * ITEM_BYTES.get(kv_dtype, 1)
        for divisor in range(1, num_kv_heads):
            if num_kv_heads % divisor == 0 and divisor * head_bytes >= MIN_OBJECT_BYTES:
                heads = divisor
                break
        return cls(
            schema=SCHEMA,
            model=model,
            kv_dtype=kv_dtype,
            page_tokens=page_tokens,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            k_head_dim=k_head_dim,
            v_head_dim=v_head_dim,
            mla=mla,
            heads_per_group=heads,
            layers_per_group=layers,
            object_layout=LAYOUT_MLA if mla else LAYOUT_MHA,
            tenant=tenant,
            weights_epoch=weights_epoch,
            variant=variant,
        )

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            _refuse("schema", self.schema, f"this version knows schema {SCHEMA}")
        if self.kv_dtype not in ITEM_BYTES:
            _refuse("kv_dtype", self.kv_dtype, f"known are {', '.join(ITEM_BYTES)}")
        for field, (low, high) in _LIMITS.items():
            if not low <= getattr(self, field) <= high:
                _refuse(field, getattr(self, field), f"must be {low} to {high}")
        for field, (low, high) in _TEXT_LIMITS.items():
            text = getattr(self, field)
            if not low <= len(text) <= high or not text.isprintable():
                _refuse(field, text[:40], f"must be {low} to {high} printable characters")
        if self.mla and self.num_kv_heads != 1:
            _refuse("num_kv_heads", self.num_kv_heads, "must be 1 with MLA")
        if self.mla == bool(self.v_head_dim):
            _refuse("v_head_dim", self.v_head_dim, "must be 0 with MLA and positive without")
        if self.num_kv_heads % self.heads_per_group:
            _refuse("heads_per_group", self.heads_per_group, f"must divide num_kv_heads, {self.num_kv_heads}")
        if self.layers_per_group > self.num_layers:
            _refuse("layers_per_group", self.layers_per_group, f"must be at most num_layers, {self.num_layers}")
        if self.object_layout != (LAYOUT_MLA if self.mla else LAYOUT_MHA):
            _refuse("object_layout", self.object_layout[:40], f"must be {LAYOUT_MLA if self.mla else LAYOUT_MHA!r}")
        if (size := self.page_bytes) > MAX_PAGE_BYTES:
            _refuse("page_tokens", self.page_tokens, f"gives pages of {size} bytes, the limit is {MAX_PAGE_BYTES}")
        if -(-self.num_layers // self.layers_per_group) * (self.num_kv_heads // self.heads_per_group) > MAX_OBJECTS:
            _refuse("layers_per_group", self.layers_per_group, f"gives more than {MAX_OBJECTS} objects a page")

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V of one page, all layers and heads, without trailers and padding."""
        return self.num_layers * self.page_tokens * self.num_kv_heads * (self.k_head_dim + self.v_head_dim) * ITEM_BYTES[self.kv_dtype]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(encoded: bytes) -> KVNamespace:
        """Inverse of `encode`. Raises ValueError, naming the field, for anything that `encode` cannot have produced."""
        try:
            namespace = msgspec.msgpack.decode(encoded, type=KVNamespace)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"not a KV namespace: {error}") from None
        if namespace.encode() != encoded:
            raise ValueError("not a KV namespace: not in canonical encoding")
        return namespace

    def digest(self, secret: Secret | str = "") -> str:
        """First 32 hex digits of sha256 over the encoding, or of HMAC-SHA256 with the pool secret as its key."""
        key = secret.reveal() if isinstance(secret, Secret) else secret
        if key:
            return hmac.new(key.encode(), self.encode(), sha256).hexdigest()[:32]
        return sha256(self.encode()).hexdigest()[:32]


def trailer_key(secret: Secret | str) -> bytes:
    """Key of the checksums in page trailers (`PageLayout.key`): TRAILER_KEY_BYTES, or none without a pool secret."""
    key = secret.reveal() if isinstance(secret, Secret) else secret
    return hmac.new(key.encode(), b"mooncake-kv page trailer", sha256).digest() if key else b""


def _refuse(field: str, value: object, why: str) -> NoReturn:
    raise ValueError(f"KV namespace: {field} is {value!r}: {why}")
