"""The key exchange gives the values of RFC 7748, and both ends the same key."""

from __future__ import annotations

import pytest

from flowrt.hosts.key_exchange import multiply, public_key, shared_key

ALICE, BOB = bytes(range(40, 72)), bytes(range(32))


def test_the_vectors_of_the_rfc() -> None:
    scalar = bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    point = bytes.fromhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    assert multiply(scalar, point).hex() == "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"
    k = u = (9).to_bytes(32, "little")
    k, u = multiply(k, u), k
    assert k.hex() == "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"


def test_both_ends_have_the_same_key_and_others_do_not() -> None:
    key = shared_key(ALICE, public_key(BOB))
    assert key == shared_key(BOB, public_key(ALICE))
    assert key != shared_key(bytes(range(1, 33)), public_key(BOB))


@pytest.mark.parametrize("public", [bytes(32), (1).to_bytes(32, "little"), b"short"])
def test_a_public_key_that_gives_a_known_secret_is_refused(public: bytes) -> None:
    with pytest.raises(ValueError):
        shared_key(ALICE, public)
