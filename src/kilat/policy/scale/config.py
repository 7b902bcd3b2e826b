"""Settings of a role scaler."""

from dataclasses import dataclass

from kilat.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ScaleConfig:
    """Targets and how slowly shares move. Raises ConfigError.

    ttft_slo_s, tpot_slo_s  targets of the time to the first token and of the time per output token
    quantile                of the measured times that is compared with the targets
    act_above               pressure (measured / target) above which shares move at all
    ratio                   how many times the pressure of one side must be that of the other
    patience                windows in a row that must want the same direction
    cool_down_s             seconds after a change in which nothing is changed
    """

    ttft_slo_s: float
    tpot_slo_s: float
    quantile: float = 0.9
    act_above: float = 0.8
    ratio: float = 1.5
    patience: int = 2
    cool_down_s: float = 3.0

    def __post_init__(self) -> None:
        for name in ("ttft_slo_s", "tpot_slo_s", "act_above"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, allowed above 0")
        if not 0 < self.quantile <= 1:
            raise ConfigError(f"quantile is {self.quantile}, allowed above 0 to 1")
        if not self.ratio >= 1:
            raise ConfigError(f"ratio is {self.ratio}, allowed 1 or more")
        if self.patience < 1:
            raise ConfigError(f"patience is {self.patience}, allowed 1 or more")
        if not self.cool_down_s >= 0:
            raise ConfigError(f"cool_down_s is {self.cool_down_s}, allowed 0 or more")
