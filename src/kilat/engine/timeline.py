"""What the engine's threads do, moment by moment: the names of the phases, and who may listen to them."""

from typing import Protocol

from kilat.policy.sched.plan import StepPlan

SCHEDULE = "host: schedule"
INPUTS = "host: inputs"
LAUNCH = "host: launch"
MODEL = "host: model"
SAMPLING = "host: sampling"
READ_BACK = "host: read back"
COMMIT = "host: commit"
CALLER = "host: outside the engine"
NO_REQUESTS = "waiting for requests"


class Watcher(Protocol):
    """Hears what the engine does. It is called within steps, so it has to be quick; it must change nothing."""

    def mark(self, phase: str) -> None:
        """From now on the calling thread does ``phase``, until its next mark. A step begins with SCHEDULE."""
        ...

    def launching(self, plan: StepPlan) -> None:
        """``plan`` goes to the runner now."""
        ...


class Unwatched:
    """Hears nothing."""

    def mark(self, phase: str) -> None:
        pass

    def launching(self, plan: StepPlan) -> None:
        pass
