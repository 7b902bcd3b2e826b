"""sim: a cluster in virtual time that drives the real schedulers, and the dispatcher and movers that it is given, under faults drawn from a seed.

Imports: base, wire, policy. Reading order: agenda (time), model (tokens and step times without math), faults (what goes wrong), worker
(one process), cluster (all of them, the wires between, and what must hold in the end).
"""
