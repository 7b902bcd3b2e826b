"""sched: which session computes which tokens in the next step, and what the results mean.

Imports: base, wire, policy/cache. Reading order: plan (the contract with the runner), config, session (the states), fairness (whose
turn it is), roster (changes of state), draft (one plan), scheduler (submit, plan, commit, abort). pace and door are details.
"""
