"""Mesh: which share of a layer this process holds, and how the shares are put together."""

from dataclasses import dataclass

from torch import Tensor

from kilat.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Mesh:
    """Tensor-parallel group: this process is ``tp_rank`` of ``tp_size``. Only size 1 exists until the collectives land."""

    tp_rank: int = 0
    tp_size: int = 1

    def share(self, n: int, what: str) -> int:
        """``n`` units divided over the ranks; raises ConfigError when it does not divide."""
        if n % self.tp_size:
            raise ConfigError(
                f"{what} is {n}, which {self.tp_size} tensor-parallel ranks do not divide; use a divisor of {n}"
            )
        return n // self.tp_size

    def slice(self, n: int, what: str) -> slice:
        """This rank's range of ``n`` units."""
        size = self.share(n, what)
        return slice(self.tp_rank * size, (self.tp_rank + 1) * size)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place where possible."""
        if self.tp_size == 1:
            return x
        raise ConfigError(f"tensor parallel size {self.tp_size} is not supported yet; use 1")
