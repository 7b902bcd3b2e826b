"""Pages on the move: what both ends of a move compare, and what one end offers to the other."""

import msgspec


class KvLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of a page: [layers, 2, page_tokens, kv_heads, head_dim] of ``dtype`` (a torch dtype's name), contiguous.

    ``model`` names whose KV it is: weights, dtype and kernel set. Pages move only between equal layouts.
    """

    layers: int
    page_tokens: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_bytes: int
    model: str


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the pages of a worker are read by one transport. ``address`` is that transport's business."""

    transport: str
    address: bytes


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pages that ``owner`` keeps pinned and unchanged until the move is released or ``deadline_s`` seconds have gone by.

    ``pages`` are page numbers of the owner's pool; the first holds token ``first_token`` of the session, and KV is valid up to token
    ``n_tokens`` (exclusive). ``names`` are content hashes of full pages, when they have some, ``checksums`` (``kv/checksum.py``) of each page or
    empty when the transport is trusted not to change bytes. ``epoch`` is the session's.
    """

    move_id: str
    owner: str
    epoch: int
    pages: list[int]
    first_token: int
    n_tokens: int
    deadline_s: float
    names: list[bytes] = []
    checksums: list[int] = []
