"""Record the scheduler's golden trace, or write it anew after a change that is meant to change plans.

    python -m tests.policy.sched.record_trace

A trace is a list of events; each has what goes in (a record, ids, times, the runner's result) and what came out (a plan's rows, the
events of a commit). A refactor must give the same bytes; test_replay.py says so.
"""

import json
import random
from pathlib import Path
from typing import Any

import msgspec

from kilat.base.errors import KilatError
from kilat.policy.sched.config import SchedulerConfig
from kilat.policy.sched.plan import StepPlan, StepResult
from kilat.policy.sched.scheduler import Scheduler
from kilat.wire.messages import SessionEvent, TokenLogprob
from kilat.wire.session import SessionRecord
from tests.policy.sched.fakes import EOS, FakeRunner, record

TRACE = Path(__file__).parents[2] / "golden" / "scheduler_trace.jsonl"
CONFIGS = (
    {"n_pages": 14, "page_tokens": 4, "max_model_len": 48, "max_num_seqs": 4, "max_step_tokens": 12},
    {
        "n_pages": 12,
        "page_tokens": 3,
        "max_model_len": 30,
        "max_num_seqs": 5,
        "max_step_tokens": 10,
        "max_waiting": 4,
        "depth": 2,
        "tenant_weights": {"a": 2.0},
        "target_step_s": 0.004,
    },
)
N_EVENTS = 160


def plain_plan(plan: StepPlan | None) -> Any:
    """A plan as JSON; token ids of admitted sessions by their number only, they are in the records."""
    if plan is None:
        return None
    return {
        "step": plan.step,
        "rows": [
            [r.session_id, r.start, r.token_ids, r.pages, r.sample, r.prompt_logprobs] for r in plan.rows
        ],
        "admitted": [[a.session_id, len(a.token_ids), a.n_prompt, a.seed] for a in plan.admitted],
        "gone": plan.gone,
        "copies": [list(c) for c in plan.copies],
    }


def plain_events(events: list[SessionEvent]) -> Any:
    return msgspec.to_builtins(events)


def plain_result(result: StepResult) -> Any:
    return {
        "token_ids": result.token_ids,
        "logprobs": {str(i): msgspec.to_builtins(x) for i, x in result.logprobs.items()},
        "prompt_logprobs": {str(i): msgspec.to_builtins(x) for i, x in result.prompt_logprobs.items()},
        "stopped": sorted(result.stopped),
        "failed": {str(i): x for i, x in result.failed.items()},
    }


def result_of(plain: dict[str, Any]) -> StepResult:
    """The StepResult that :func:`plain_result` wrote."""

    def logprobs(name: str) -> dict[int, list[TokenLogprob]]:
        return {int(i): msgspec.convert(x, list[TokenLogprob]) for i, x in plain[name].items()}

    failed = {int(i): x for i, x in plain["failed"].items()}
    return StepResult(
        plain["token_ids"],
        logprobs("logprobs"),
        logprobs("prompt_logprobs"),
        frozenset(plain["stopped"]),
        failed,
    )


class Replayer:
    """Gives events to a scheduler, one by one, and says what came out."""

    def __init__(self) -> None:
        self.scheduler: Scheduler
        self.plans: list[StepPlan] = []

    def play(self, event: dict[str, Any]) -> Any:
        now_s = event.get("now_s", 0.0)
        match event["do"]:
            case "start":
                self.scheduler = Scheduler(
                    SchedulerConfig(**event["config"]), model_id="trace", eos_ids=[EOS]
                )
                self.plans = []
                return None
            case "submit":
                try:
                    self.scheduler.submit(msgspec.convert(event["record"], SessionRecord), now_s)
                except KilatError as e:
                    return str(e)
                return "taken"
            case "abort":
                return plain_events(self.scheduler.abort(event["ids"], now_s))
            case "plan":
                plan = self.scheduler.plan(now_s)
                if plan is not None:
                    self.plans.append(plan)
                return plain_plan(plan)
            case "commit":
                return plain_events(
                    self.scheduler.commit(self.plans.pop(0), result_of(event["result"]), now_s)
                )
            case "counters":
                return {**self.scheduler.counters(), **self.scheduler.gauges()}
        raise ValueError(event["do"])


def line(event: dict[str, Any], out: Any) -> str:
    """One event and its outcome as one line of the trace."""
    return json.dumps({**event, "out": out}, sort_keys=True, separators=(",", ":"))


def random_record(rng: random.Random, number: int, now_s: float) -> SessionRecord:
    prompt = [*[1, 2, 3, 4] * rng.randint(0, 4), *(rng.randint(5, 9) for _ in range(rng.randint(1, 12)))]
    return record(
        f"s{number}",
        prompt,
        n=rng.choice([1, 1, 1, 3]),
        seed=rng.randint(0, 9),
        max_tokens=rng.choice([1, 4, 9, None]),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=rng.choice([(), tuple(range(0, EOS, 9))]),
        prompt_logprobs=rng.choice([None, None, 0]),
        tenant=rng.choice("ab"),
        priority=rng.choice([0, 0, 1]),
        arrival_s=now_s,
    )


def make(seed: int, config: dict[str, Any]) -> list[str]:
    """The trace of one random workload."""
    rng = random.Random(seed)
    replayer, runner = Replayer(), FakeRunner(config["n_pages"], config["page_tokens"])
    results: list[StepResult] = []
    lines: list[str] = []
    n_submitted = 0

    def play(event: dict[str, Any]) -> Any:
        out = replayer.play(event)
        lines.append(line(event, out))
        return out

    play({"do": "start", "config": config})
    for i in range(N_EVENTS):
        now_s = round(i * 0.001 + rng.random() * 0.0005, 6)
        choice = rng.random()
        if choice < 0.15:
            r = random_record(rng, n_submitted, now_s)
            n_submitted += 1
            play({"do": "submit", "record": msgspec.to_builtins(r), "now_s": now_s})
        elif choice < 0.18 and n_submitted:
            play({"do": "abort", "ids": [f"s{rng.randrange(n_submitted)}"], "now_s": now_s})
        elif len(replayer.plans) < config.get("depth", 1) and choice < 0.65:
            if play({"do": "plan", "now_s": now_s}) is not None:
                results.append(runner.run(replayer.plans[-1]))
        elif replayer.plans:
            play({"do": "commit", "result": plain_result(results.pop(0)), "now_s": now_s})
    play({"do": "counters"})
    return lines


def main() -> None:
    lines = [text for seed, config in enumerate(CONFIGS) for text in make(seed, config)]
    TRACE.parent.mkdir(exist_ok=True)
    TRACE.write_text("\n".join(lines) + "\n")
    print(f"{TRACE}: {len(lines)} events, {TRACE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
