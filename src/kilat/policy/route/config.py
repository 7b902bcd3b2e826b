"""Settings of a router."""

from dataclasses import dataclass

from kilat.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Weights and limits. Raises ConfigError.

    dead_after_s         a worker that was not heard of for so long gets nothing
    local_prompt_tokens  a prompt with at most so many tokens to compute may stay on a decode worker
    short_answer_tokens  an answer of at most so many tokens may be written by a prefill worker, whose steps stay short meanwhile
    session_steps        decode steps that one more session costs the others of its worker; how much load counts against cached pages
    stall_share          part of the time of a prompt chunk that counts for each session decoding beside it
    move_s, page_move_s  seconds to read pages from a peer: for each move, and for each page, until they have been measured
    target_step_s        what workers keep their steps to while they decode beside a prompt, which gets the time that is left;
                         None: they do not, and stall_share says what a prompt costs those that decode
    move_margin          moving must be estimated so many times cheaper than computing
    """

    dead_after_s: float = 5.0
    local_prompt_tokens: int = 128
    short_answer_tokens: int = 8
    session_steps: float = 4.0
    stall_share: float = 0.1
    move_s: float = 0.005
    page_move_s: float = 0.001
    move_margin: float = 1.5
    target_step_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("dead_after_s", "move_margin"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, allowed above 0")
        for name in (
            "local_prompt_tokens",
            "short_answer_tokens",
            "session_steps",
            "stall_share",
            "move_s",
            "page_move_s",
        ):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, allowed 0 or more")
        if self.target_step_s is not None and not self.target_step_s > 0:
            raise ConfigError(f"target_step_s is {self.target_step_s}, allowed above 0")
