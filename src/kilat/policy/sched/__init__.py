"""sched: which session computes which tokens in the next step, and what the results mean.

Imports: base, wire, policy/cache. Reading order: plan (the contract with the runner), config, session (the states), fairness (whose
turn it is), roster (changes of state), draft (one plan), outcome (one result), scheduler (submit, plan, commit, abort; sessions and
pages on the move, whose data is in moves). pace and door are details.
"""
