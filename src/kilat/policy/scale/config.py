"""Settings of a role scaler."""

from dataclasses import dataclass

from kilat.base.errors import ConfigError

BESIDE = 0.9
"""Part of the TPOT target that a step keeps to which decodes beside a chunk of a prompt."""
AIM = 0.88
"""Part of what they keep to that such steps take, as a rule (``MARGIN`` of policy/sched)."""


@dataclass(frozen=True, slots=True)
class ScaleConfig:
    """Targets and how slowly shares move. Raises ConfigError.

    ttft_slo_s, tpot_slo_s  targets of the time to the first token and of the time per output token
    quantile      of the measured times that is compared with the targets
    act_above     pressure (needed / there) above which shares move at all
    ratio         how many times lower than that it must be for fewer workers to be set apart
    patience      windows in a row that must want the same direction
    cool_down_s   seconds after a change in which nothing is changed
    least_workers, most_workers  bounds of the number of workers that is wished for; 0: as many as it takes
    fewer_after   windows in a row in which fewer workers would do, before fewer are wished for
    grow_after_s, shrink_after_s  how long more, or fewer, workers must be wished for before some are started, or one is ended
    """

    ttft_slo_s: float
    tpot_slo_s: float
    quantile: float = 0.9
    act_above: float = 0.8
    ratio: float = 1.25
    patience: int = 2
    cool_down_s: float = 3.0
    least_workers: int = 1
    most_workers: int = 0
    fewer_after: int = 60
    grow_after_s: float = 5.0
    shrink_after_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("ttft_slo_s", "tpot_slo_s", "act_above"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, allowed above 0")
        if not 0 < self.quantile <= 1:
            raise ConfigError(f"quantile is {self.quantile}, allowed above 0 to 1")
        for name in ("ratio", "patience", "least_workers", "fewer_after"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, allowed 1 or more")
        for name in ("cool_down_s", "most_workers", "grow_after_s", "shrink_after_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, allowed 0 or more")
        if 0 < self.most_workers < self.least_workers:
            raise ConfigError(
                f"most_workers is {self.most_workers}, allowed {self.least_workers} (least_workers) or more"
            )

    @property
    def target_step_s(self) -> float:
        """What a step with a chunk of a prompt in it keeps to, where sessions decode."""
        return BESIDE * self.tpot_slo_s

    @property
    def usual_step_s(self) -> float:
        """What such a step takes, as a rule."""
        return AIM * self.target_step_s
