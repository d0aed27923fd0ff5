"""X25519 (RFC 7748): two ends agree on a key, of which a reader of their public keys learns nothing.

The engine that starts a host server carries only public keys, in its own authenticated connections. Keys of the run travel later, over the
encrypted connection that this key opens. Each key is used for one start, so that the time of the computation reveals nothing of use.
"""

from __future__ import annotations

from hashlib import sha256

_P = 2**255 - 19
_BASE = (9).to_bytes(32, "little")


def public_key(private: bytes) -> bytes:
    """Returns the public key of 32 random bytes."""
    return multiply(private, _BASE)


def shared_key(private: bytes, other_public: bytes) -> bytes:
    """The key of both ends, 32 bytes. Raises ValueError for a public key that would make it predictable."""
    secret = multiply(private, other_public)
    if not any(secret):
        raise ValueError("the public key of the other end is not valid")
    return sha256(b"flowrt host server" + secret + b"".join(sorted((public_key(private), other_public)))).digest()


def multiply(scalar: bytes, point: bytes) -> bytes:
    """The function X25519 of the RFC. Raises ValueError unless both have 32 bytes."""
    if len(scalar) != 32 or len(point) != 32:
        raise ValueError("a key has 32 bytes")
    k = (int.from_bytes(scalar, "little") & ~7 & (2**255 - 1)) | 2**254
    x1 = int.from_bytes(point, "little") & (2**255 - 1)
    x2, z2, x3, z3, swap = 1, 0, x1, 1, 0
    for bit in reversed(range(255)):
        wanted = k >> bit & 1
        if swap != wanted:
            x2, x3, z2, z3 = x3, x2, z3, z2
        swap = wanted
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        da, cb, aa, bb = d * a % _P, c * b % _P, a * a % _P, b * b % _P
        x3, z3 = (da + cb) ** 2 % _P, x1 * (da - cb) ** 2 % _P
        x2, z2 = aa * bb % _P, (aa - bb) * (aa + 121665 * (aa - bb)) % _P
    if swap:
        x2, z2 = x3, z3
    return (x2 * pow(z2, _P - 2, _P) % _P).to_bytes(32, "little")
