"""Content hashes of KV pages and seeds of samples. Stable across processes, machines and Python versions."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16


def root_hash(model_id: str, salt: str = "") -> bytes:
    """Parent of a first page: names the model (weights, dtype, page layout) and the tenant's salt.

    Two tenants with different salts never share a page, and cannot learn of each other's prompts by timing.
    """
    return blake2b(f"{len(model_id)}:{model_id}{salt}".encode(), digest_size=HASH_BYTES).digest()


def page_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of one full page: ``parent`` hash and the page's token ids (32-bit little endian)."""
    ids = array("i", token_ids)
    return blake2b(ids.tobytes(), key=parent, digest_size=HASH_BYTES).digest()


def branch_seed(seed: int, k: int) -> int:
    """63-bit seed of sample ``k`` of a request with ``seed``; sample 0 keeps the request's own seed."""
    if k == 0:
        return seed
    digest = blake2b(f"{seed}:{k}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
