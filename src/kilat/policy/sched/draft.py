"""Draft: one StepPlan being made. Decode rows first, then prefill chunks, both until the token budget is used."""

from kilat.base import metrics
from kilat.policy.cache.table import PageTable
from kilat.policy.sched.pace import Pace
from kilat.policy.sched.plan import PENDING, Admitted, Row, StepPlan
from kilat.policy.sched.roster import Roster
from kilat.policy.sched.session import Session, State
from kilat.policy.sched.waiting import turn


class Draft:
    """Collects the rows of the next plan from the sessions of ``roster``. Used once: ``decode()``, ``prefill()``, ``plan()``.

    ``sessions`` are those of ``rows``, in the same order. ``resting``: a session that gets no row, so that the next plan can preempt
    it. ``may_admit`` is off once pages have run out: whoever comes now would be in the way of those that run.
    """

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self.page_tokens = roster.config.page_tokens
        self.rows: list[Row] = []
        self.sessions: list[Session] = []
        self.admitted: list[Admitted] = []
        self.copies: list[tuple[int, int]] = []
        self.prefilling: list[Session] = []
        self.resting: Session | None = None
        self.may_admit = True
        self.has_prefill = False

    def plan(self, step: int) -> StepPlan:
        """The finished plan; takes over the roster's ``gone``."""
        gone, self.roster.gone = self.roster.gone, []
        return StepPlan(step, self.rows, self.admitted, gone, self.copies)

    # -- decode -------------------------------------------------------------------------------------------------------------------

    def decode(self) -> None:
        """One row for each running session that has one token to compute, oldest of the highest priority first: preemption takes from
        the other end, so it never meets a session that has a row in this plan."""
        rows, sessions, page_tokens = self.rows, self.sessions, self.page_tokens
        for s in list(self.roster.running):
            if s.state is not State.RUNNING or s is self.resting:
                continue
            start = s.n_planned
            n = len(s.tokens) - start
            if n > 1:
                self.prefilling.append(s)
                continue
            if n < 1 and not s.can_run_ahead:
                continue
            table = s.table
            if table is None or (start >= len(table.pages) * page_tokens and not self._make_room(s, table)):
                continue
            rows.append(Row(s.id, start, [s.tokens[start] if n else PENDING], table.pages, True))
            sessions.append(s)
            s.n_planned = start + 1
            s.n_flight += 1
            s.tenant.charge(1)

    def _make_room(self, s: Session, table: PageTable) -> bool:
        """One more page for ``s``: evict, then preempt others. False when ``s`` gets no row in this plan (or was preempted itself)."""
        while table.cover(s.n_planned + 1) <= s.n_planned:
            self.may_admit = False
            victim = self._victim(s)
            if victim is None:
                return False
            self.roster.preempt(victim)
            if victim is s:
                return False
        return True

    def _victim(self, helped: Session) -> Session | None:
        """The youngest session of the lowest priority that has nothing in flight; None when waiting for a commit is better."""
        if self.roster.ghosts:
            return None  # their pages come back with the next commit
        running = self.roster.running
        for s in reversed(running):
            if s is helped:
                break
            if s.n_flight == 0:
                return s
        last = running[-1]
        if last is not helped:
            self.resting = last
        elif helped.n_flight == 0:
            return helped
        return None

    # -- prefill ------------------------------------------------------------------------------------------------------------------

    def prefill(self, pace: Pace) -> None:
        """Chunks of prompts, in turn: of sessions that run already, and of waiting ones as long as they fit."""
        n_left = self.roster.config.max_step_tokens - len(self.rows)
        budget = pace.prefill_tokens(len(self.rows), n_left, self.page_tokens)
        started = sorted(
            (s for s in self.prefilling if s.state is State.RUNNING and s is not self.resting),
            key=turn,
            reverse=True,
        )
        while budget > 0:
            head = self.roster.waiting.head() if self.may_admit else None
            if head is not None and (not started or turn(head) < turn(started[-1])):
                table = self._admit(head)
                if table is None:
                    self.may_admit = False
                else:
                    budget -= self._chunk(head, table, budget)
            elif started:
                s = started.pop()
                if s.table is not None:
                    budget -= self._chunk(s, s.table, budget)
            else:
                return

    def _chunk(self, s: Session, table: PageTable, budget: int) -> int:
        """A row with as many of the next tokens of ``s`` as budget and pages allow; returns how many. Out of pages it waits: the
        pages it needs were counted when it was admitted, so those that took them will give them back."""
        start = s.n_planned
        end = table.cover(min(len(s.tokens), start + budget))
        if end <= start:
            return 0
        wants_logprobs = s.prompt_logprobs is not None and start < s.n_prompt - 1
        self.rows.append(
            Row(s.id, start, s.tokens[start:end], table.pages, end == len(s.tokens), wants_logprobs)
        )
        self.sessions.append(s)
        self.has_prefill = True
        s.n_planned = end
        s.n_flight += 1
        s.tenant.charge(end - start)
        return end - start

    # -- admission ----------------------------------------------------------------------------------------------------------------

    def _admit(self, s: Session) -> PageTable | None:
        """Start a waiting session if a place is free and its tokens fit beside what the running sessions need; else None."""
        if len(self.roster.running) >= self.roster.config.max_running:
            return None
        parent = s.parent.table if s.parent is not None and s.parent.can_be_forked else None
        hits = self._hits(s) if parent is None else []
        n_have = len(hits) if parent is None else (s.n_prompt - 1) // self.page_tokens
        n_taken = self._n_pages(s) - n_have + self.roster.pool.n_cached_of(hits)
        if n_taken + self._reserve() > self.roster.pool.n_available:
            return None
        if parent is None:
            table, n_computed = PageTable(self.roster.pool, hits, len(hits)), len(hits) * self.page_tokens
        else:
            forked = parent.fork(s.n_prompt - 1)
            if forked is None:
                return None
            table, n_computed = forked[0], s.n_prompt - 1
            self.copies += forked[1]
        self._count(s, n_computed, forked=parent is not None)
        self.roster.start(s, table, n_computed)
        self.admitted.append(Admitted(s.id, list(s.tokens), s.n_prompt, s.params, s.seed))
        return table

    def _hits(self, s: Session) -> list[int]:
        """Pages that hold the start of the session's tokens. Its last token is never among them: computing it gives the logits."""
        if not self.roster.config.prefix_cache or s.prompt_logprobs is not None:
            return []
        n_pages = (len(s.tokens) - 1) // self.page_tokens
        return self.roster.pool.match(s.name_pages(n_pages, self.page_tokens)[:n_pages])

    def _reserve(self) -> int:
        """Pages that the running sessions need for their known tokens, and one more for each: with less left, the next steps would
        have to preempt somebody at once."""
        return sum(
            max(self._n_pages(s) - len(s.table.pages), 0) + 1
            for s in self.roster.running
            if s.table is not None
        )

    def _n_pages(self, s: Session) -> int:
        return -(-len(s.tokens) // self.page_tokens)

    def _count(self, s: Session, n_computed: int, *, forked: bool) -> None:
        """On first admission only: pages found again after a preemption are no success of the prefix cache."""
        if s.n_hit is not None:
            return
        s.n_hit = 0 if forked else min(n_computed, s.n_prompt)
        if not forked:
            self.roster.counts[metrics.PROMPT_TOKENS] += s.n_prompt
            if self.roster.config.prefix_cache and s.prompt_logprobs is None:
                self.roster.counts[metrics.PREFIX_QUERIED_TOKENS] += len(s.tokens)
                self.roster.counts[metrics.PREFIX_HIT_TOKENS] += n_computed
