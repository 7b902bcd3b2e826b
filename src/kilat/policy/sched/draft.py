"""Draft: one StepPlan being made. Decode rows first, then prefill chunks, both until the token budget is used."""

from kilat.base import metrics
from kilat.policy.cache.table import PageTable
from kilat.policy.sched.pace import Pace
from kilat.policy.sched.plan import PENDING, Admitted, Row, StepPlan
from kilat.policy.sched.roster import Roster
from kilat.policy.sched.session import Session, State
from kilat.policy.sched.waiting import turn

MAX_ASIDE = 16
"""Waiting sessions that one plan passes over because the pages they want are being computed."""


class Draft:
    """Collects the rows of the next plan from the sessions of ``roster``. Used once: ``decode()``, ``prefill()``, ``plan()``.

    ``sessions`` are those of ``rows``, in the same order. ``resting``: a session that gets no row, so that the next plan can preempt
    it. ``may_admit`` is off once pages have run out: whoever comes now would be in the way of those that run. ``aside``: waiting
    sessions that will find more of their prompt in the cache a step later. ``sources``: chains that ``copies`` read from; the plan owns
    them until it is committed, whatever becomes of their sessions.

    Sums over the running sessions are made once, when :meth:`prefill` begins, and kept while it admits: ``promised`` is what
    ``Roster.n_promised`` would say, ``computing`` are those with a full page of their prompt still to compute.
    """

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self.page_tokens = roster.config.page_tokens
        self.rows: list[Row] = []
        self.sessions: list[Session] = []
        self.admitted: list[Admitted] = []
        self.copies: list[tuple[int, int]] = []
        self.sources: list[list[int]] = []
        self.aside: set[Session] = set()
        self.prefilling: list[Session] = []
        self.promised = 0
        self.computing: list[Session] = []
        self.resting: Session | None = None
        self.may_admit = True
        self.n_prefill = 0
        self.has_preempted = False

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
            self.has_preempted = True
            if victim is s:
                return False
        return True

    def _victim(self, helped: Session) -> Session | None:
        """The youngest session of the lowest priority that has pages and nothing in flight, one that is not running yet first; None when
        waiting for a commit is better."""
        if self.roster.ghosts:
            return None  # their pages come back with the next commit
        parked = self.roster.last_parked()
        if parked is not None and parked.rank > helped.rank:
            return parked
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
        if self.roster.waiting:
            self.promised = self.roster.n_promised()
            self.computing = [r for r in self.roster.running if r.is_computing_pages]
        n_left = self.roster.config.max_step_tokens - len(self.rows)
        budget = pace.prefill_tokens(len(self.rows), n_left, self.page_tokens)
        started = sorted(
            (s for s in self.prefilling if s.state is State.RUNNING and s is not self.resting),
            key=turn,
            reverse=True,
        )
        while budget > 0:
            head = self._head() if self.may_admit else None
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
        start, n_pages = s.n_planned, len(table.pages)
        end = table.cover(min(len(s.tokens), start + budget))
        self.promised -= len(table.pages) - n_pages
        if end <= start:
            return 0
        wants_logprobs = s.prompt_logprobs is not None and start < s.n_prompt - 1
        self.rows.append(
            Row(s.id, start, s.tokens[start:end], table.pages, end == len(s.tokens), wants_logprobs)
        )
        self.sessions.append(s)
        self.n_prefill += end - start
        s.n_planned = end
        s.n_flight += 1
        s.tenant.charge(end - start)
        return end - start

    # -- admission ----------------------------------------------------------------------------------------------------------------

    def _head(self) -> Session | None:
        """The waiting session whose turn it is. One that a running session is computing the next page for is passed over: it takes
        that page from the cache after the next commit instead of computing it too."""
        waiting = self.roster.waiting
        head = waiting.head(self.aside)
        while head is not None and self._is_expecting(head):
            self.aside.add(head)
            head = waiting.head(self.aside) if len(self.aside) < MAX_ASIDE else None
        return head

    def _is_expecting(self, s: Session) -> bool:
        """Whether a running session, of no lower priority, computes the first full page of ``s`` that the cache does not have."""
        if s.table is not None or (s.parent is not None and s.parent.can_be_forked):
            return False
        ahead = [r.chain for r in self.computing if r.root == s.root and r.rank[0] <= s.rank[0]]
        if not ahead:
            return False
        n_hits = len(self._hits(s))
        wanted = s.chain[n_hits] if n_hits < self._n_findable(s) else None
        return any(wanted == chain[n_hits] for chain in ahead if n_hits < len(chain))

    def _admit(self, s: Session) -> PageTable | None:
        """Start a waiting session if a place is free and its tokens fit beside what the running sessions need; else None."""
        if len(self.roster.running) >= self.roster.config.max_running:
            return None
        if s.table is not None:
            return self._start(s, s.table, s.n_computed) if self._fits(s, len(s.table.pages)) else None
        parent = s.parent.table if s.parent is not None and s.parent.can_be_forked else None
        if parent is None:
            hits = self._hits(s)
            if not self._fits(s, len(hits) - self.roster.pool.n_cached_of(hits)):
                return None
            table, n_computed = PageTable(self.roster.pool, hits, len(hits)), len(hits) * self.page_tokens
        else:
            n_computed = s.n_prompt - 1
            n_shared = n_computed // self.page_tokens
            forked = parent.fork(n_computed) if self._fits(s, n_shared) else None
            if forked is None:
                return None
            table, copies = forked
            if copies:
                self.copies += copies
                self.sources.append(parent.pages[: n_shared + 1])
        self._count(s, n_computed, forked=parent is not None)
        return self._start(s, table, n_computed)

    def _start(self, s: Session, table: PageTable, n_computed: int) -> PageTable:
        self.roster.start(s, table, n_computed)
        self.promised += self.roster.n_promised_to(s)
        if s.is_computing_pages:
            self.computing.append(s)
        self.admitted.append(Admitted(s.id, list(s.tokens), s.n_prompt, s.params, s.seed))
        return table

    def _fits(self, s: Session, n_have: int) -> bool:
        """Whether the pool has what ``s`` needs beyond ``n_have`` pages, beside what the running sessions need."""
        n_taken = -(-len(s.tokens) // self.page_tokens) - n_have
        return n_taken + self.promised <= self.roster.pool.n_available

    def _hits(self, s: Session) -> list[int]:
        """Pages that hold the start of the session's tokens."""
        n_pages = self._n_findable(s)
        return self.roster.pool.match(s.name_pages(n_pages, self.page_tokens)[:n_pages])

    def _n_findable(self, s: Session) -> int:
        """Full pages that may come from the cache. The last token is never on them: computing it gives the logits."""
        if not self.roster.config.prefix_cache or s.prompt_logprobs is not None:
            return 0
        return (len(s.tokens) - 1) // self.page_tokens

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
