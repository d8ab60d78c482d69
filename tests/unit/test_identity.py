"""KVNamespace: the digest covers every field, derivation follows the rule, decode refuses what a hostile peer may send."""

from __future__ import annotations

import copy
import hashlib
import hmac
import logging
import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mooncake_kv.common.identity import ITEM_BYTES, MIN_OBJECT_BYTES, TRAILER_KEY_BYTES, KVNamespace, trailer_key
from mooncake_kv.common.secret import Secret

FACTS: dict[str, Any] = {
    "model": "ab" * 32,
    "kv_dtype": "bfloat16",
    "num_layers": 32,
    "num_kv_heads": 8,
    "k_head_dim": 128,
    "v_head_dim": 128,
}
OTHER: dict[str, Any] = {
    "model": "cd" * 32,
    "kv_dtype": "float16",
    "page_tokens": 128,
    "num_layers": 64,
    "num_kv_heads": 16,
    "k_head_dim": 64,
    "v_head_dim": 64,
    "heads_per_group": 2,
    "layers_per_group": 16,
    "tenant": "b",
    "weights_epoch": "1",
    "variant": "x",
}


@st.composite
def namespaces(draw: st.DrawFn) -> KVNamespace:
    mla = draw(st.booleans())
    dim = draw(st.sampled_from([16, 64, 80, 128, 576]))
    return KVNamespace.build(
        model=draw(st.text("0123456789abcdef", min_size=64, max_size=64)),
        kv_dtype=draw(st.sampled_from(sorted(ITEM_BYTES))),
        num_layers=draw(st.integers(1, 100)),
        num_kv_heads=1 if mla else draw(st.integers(1, 40)),
        k_head_dim=dim,
        v_head_dim=0 if mla else dim,
        mla=mla,
        page_tokens=draw(st.sampled_from([16, 32, 64, 128])),
        layers_per_group=draw(st.integers(0, 120)),
        tenant=draw(st.sampled_from(["default", "b", "ü"])),
    )


def test_digest_is_the_first_half_of_sha256_of_the_encoding() -> None:
    namespace = KVNamespace.build(**FACTS)
    encoded = namespace.encode()
    assert namespace.digest() == hashlib.sha256(encoded).hexdigest()[:32]
    keyed = hmac.new(b"pool", encoded, hashlib.sha256).hexdigest()[:32]
    assert namespace.digest("pool") == namespace.digest(Secret("pool")) == keyed != namespace.digest()
    assert namespace.digest(Secret()) == namespace.digest()


def test_encoding_is_stable() -> None:
    """A change of the encoding orphans every stored page: it needs another SCHEMA, and another value here."""
    assert KVNamespace.build(**FACTS).digest() == "48783968a9a93b5074df3ebc52fa8035"


@pytest.mark.parametrize("field", sorted(OTHER))
def test_any_field_changes_the_digest(field: str) -> None:
    namespace = KVNamespace.build(**FACTS)
    change = {field: OTHER[field]}
    if field.endswith("head_dim"):
        change = {"k_head_dim": 64, "v_head_dim": 64}
    assert msgspec.structs.replace(namespace, **change).digest() != namespace.digest()


@given(namespaces(), namespaces())
def test_round_trip_and_injective(a: KVNamespace, b: KVNamespace) -> None:
    assert KVNamespace.decode(a.encode()) == a
    assert (a.digest() == b.digest()) == (a == b)


@given(namespaces())
def test_heads_per_group_is_the_smallest_divisor_that_reaches_a_mebibyte(namespace: KVNamespace) -> None:
    def size(heads: int) -> int:
        dims = namespace.k_head_dim + namespace.v_head_dim
        return namespace.layers_per_group * namespace.page_tokens * heads * dims * ITEM_BYTES[namespace.kv_dtype]

    divisors = [d for d in range(1, namespace.num_kv_heads + 1) if namespace.num_kv_heads % d == 0]
    reaching = [d for d in divisors if size(d) >= MIN_OBJECT_BYTES]
    assert namespace.heads_per_group == (reaching[0] if reaching else namespace.num_kv_heads)


@pytest.mark.parametrize(
    ("layers", "heads", "dim", "expected"),
    [(32, 8, 128, 1), (80, 8, 128, 1), (30, 3, 64, 3), (28, 4, 128, 2), (8, 4, 128, 4), (8, 3, 128, 3)],
)
def test_heads_per_group_of_known_shapes(layers: int, heads: int, dim: int, expected: int) -> None:
    facts = FACTS | {"num_layers": layers, "num_kv_heads": heads, "k_head_dim": dim, "v_head_dim": dim}
    assert KVNamespace.build(**facts).heads_per_group == expected


def test_layers_per_group_zero_or_more_than_all_means_all() -> None:
    assert KVNamespace.build(**FACTS) == KVNamespace.build(**FACTS, layers_per_group=32) == KVNamespace.build(**FACTS, layers_per_group=99)
    assert KVNamespace.build(**FACTS, layers_per_group=10).layers_per_group == 10


HOSTILE: list[tuple[str, Any]] = [
    ("schema", 2),
    ("model", ""),
    ("model", "a" * 129),
    ("model", "a\nb"),
    ("kv_dtype", "int16"),
    ("page_tokens", 0),
    ("page_tokens", -64),
    ("page_tokens", 2**40),
    ("page_tokens", True),
    ("page_tokens", 64.0),
    ("num_layers", 0),
    ("num_layers", 2**63),
    ("num_kv_heads", 0),
    ("num_kv_heads", 7),
    ("num_kv_heads", 2**20),
    ("k_head_dim", 0),
    ("k_head_dim", 10**6),
    ("v_head_dim", 0),
    ("v_head_dim", -1),
    ("mla", True),
    ("mla", 1),
    ("heads_per_group", 0),
    ("heads_per_group", 3),
    ("heads_per_group", 16),
    ("layers_per_group", 0),
    ("layers_per_group", 33),
    ("object_layout", "token,head"),
    ("object_layout", "layer,token,dim"),
    ("tenant", ""),
    ("tenant", "x" * 200),
    ("weights_epoch", "x" * 200),
    ("variant", "x" * 2000),
    ("variant", None),
]


@pytest.mark.parametrize(("field", "value"), HOSTILE)
def test_decode_refuses_and_names_the_field(field: str, value: Any) -> None:
    facts = msgspec.structs.asdict(KVNamespace.build(**FACTS))
    facts["heads_per_group"] = 2
    with pytest.raises(ValueError) as caught:
        KVNamespace.decode(msgspec.msgpack.encode(facts | {field: value}))
    named = {"num_kv_heads": ("num_kv_heads", "heads_per_group"), "mla": ("mla", "num_kv_heads")}.get(field, (field,))
    assert any(name in str(caught.value) for name in named)
    assert len(str(caught.value)) < 300


def test_decode_refuses_pages_that_are_huge_or_in_too_many_objects() -> None:
    facts = msgspec.structs.asdict(KVNamespace.build(**FACTS))
    with pytest.raises(ValueError, match="the limit is"):
        KVNamespace.decode(msgspec.msgpack.encode(facts | {"page_tokens": 4096, "num_layers": 1024, "num_kv_heads": 1024}))
    with pytest.raises(ValueError, match="objects a page"):
        KVNamespace.decode(msgspec.msgpack.encode(facts | {"num_layers": 1024, "layers_per_group": 1}))


def test_decode_refuses_other_encodings_and_garbage() -> None:
    namespace = KVNamespace.build(**FACTS)
    facts = msgspec.structs.asdict(namespace)
    for wrong in (
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        namespace.encode()[:-1],
        namespace.encode() + b"\0",
        msgspec.msgpack.encode(facts | {"more": 1}),
        msgspec.msgpack.encode(dict(reversed(facts.items()))),
        msgspec.msgpack.encode({k: v for k, v in facts.items() if k != "variant"}),
        msgspec.msgpack.encode(list(facts.values())),
        msgspec.msgpack.encode(facts | {"tenant": b"\xff\xfe"}),
        namespace.encode().replace(b"default", b"\xff\xfe\xfd\xfc\xfb\xfa\xf9"),
    ):
        with pytest.raises(ValueError):
            KVNamespace.decode(wrong)


@given(st.binary(max_size=300))
def test_decode_of_any_bytes_raises_only_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        KVNamespace.decode(data)


@given(namespaces(), st.integers(0, 400), st.integers(1, 255))
def test_a_changed_byte_gives_another_namespace_or_an_error(namespace: KVNamespace, place: int, change: int) -> None:
    encoded = bytearray(namespace.encode())
    assume(place < len(encoded))
    encoded[place] ^= change
    try:
        other = KVNamespace.decode(bytes(encoded))
    except ValueError:
        return
    assert other != namespace and other.digest() != namespace.digest()


def test_secret_does_not_show_itself(caplog: pytest.LogCaptureFixture) -> None:
    secret = Secret("hunter2")
    with caplog.at_level(logging.INFO):
        logging.getLogger("x").info("secret %s %r %s", secret, secret, [secret])
    assert "hunter2" not in caplog.text + f"{secret}{secret!r}{[secret]}" + format(secret)
    for encode in (msgspec.json.encode, msgspec.msgpack.encode, pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError) as caught:
            encode(secret)
        assert "hunter2" not in str(caught.value)
    assert secret.reveal() == "hunter2"
    assert secret and not Secret()
    assert secret == Secret("hunter2") != Secret("other")
    assert secret != "hunter2"
    assert len({secret, Secret("hunter2")}) == 1


def test_trailer_key() -> None:
    assert trailer_key("") == trailer_key(Secret()) == b""
    key = trailer_key("hunter2")
    assert len(key) == TRAILER_KEY_BYTES and key == trailer_key(Secret("hunter2")) != trailer_key("hunter3")
    assert key.hex()[:32] != KVNamespace.build(**FACTS).digest("hunter2")
