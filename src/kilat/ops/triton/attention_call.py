"""What the kernels of attention are given."""

from dataclasses import dataclass

from torch import Tensor

from kilat.ops.batch import StepBatch
from kilat.ops.rope_write import KvScale

LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Call:
    """One attention call as the kernels see it; ``out`` [T, Hq, D] is written, with ``out_scale`` [Hq, T] in e4m3 (D is 128 then).

    ``few`` is the most tokens of a row that the decode kernel takes; rows with more go to a block kernel.
    """

    q: Tensor
    kv: Tensor
    out: Tensor
    batch: StepBatch
    scale: float
    window: int
    few: int
    exact: bool
    kv_scale: KvScale | None = None
    out_scale: Tensor | None = None

    @property
    def k_scale(self) -> Tensor | None:
        return self.kv_scale.k if self.kv_scale else None

    @property
    def v_scale(self) -> Tensor | None:
        return self.kv_scale.v if self.kv_scale else None

    @property
    def n_kv(self) -> int:
        return self.kv.shape[3]

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q.shape[1] // self.n_kv

    @property
    def group_pad(self) -> int:
        return 1 << (self.group - 1).bit_length()
