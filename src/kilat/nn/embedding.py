"""The table of token embeddings, which may be the output head too."""

from torch import Tensor

from kilat.nn.build import Build
from kilat.nn.linear import pack_blocks
from kilat.ops.linear import LinearWeight


class Embedding:
    """Token ids [T] int32 -> [T, hidden] in ``dtype``.

    A table that stays in GGUF's blocks is packed as a linear weight; its rows are dequantized as they are looked up, and a head that is
    tied to it is the same memory.
    """

    def __init__(self, build: Build, name: str, shape: tuple[int, int]) -> None:
        self.dtype, self.device = build.dtype, build.device
        stored = build.read_blocks(name, shape)
        self._packed = pack_blocks(build, name, [stored]) if stored else None
        self._table = None if stored else build.take(name, shape)
        self._blocks = build.blocks

    def __call__(self, ids: Tensor) -> Tensor:
        if self._table is not None:
            return self._table.index_select(0, ids)  # takes int32, which indexing would copy to int64
        assert self._blocks is not None and self._packed is not None
        return self._blocks.gather(ids, self._packed)

    def as_head(self, build: Build) -> LinearWeight:
        """The table as a weight of ``linear``: hidden states -> logits."""
        if self._table is None:
            assert self._packed is not None
            return self._packed
        head = build.kernels.pack_linear(self._table, None)
        if head.data is not self._table:
            # the kernel set keeps a packed copy beside the table
            build.on_weight("lm_head.weight", head.n_bytes)
        return head


def untied_head(build: Build, name: str, shape: tuple[int, int]) -> LinearWeight:
    """A head with a weight of its own."""
    stored = build.read_blocks(name, shape)
    if stored is not None:
        return pack_blocks(build, name, [stored])
    return build.kernels.pack_linear(build.take(name, shape), None)
