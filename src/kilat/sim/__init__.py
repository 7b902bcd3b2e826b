"""sim: a cluster in virtual time that drives the real schedulers and whatever dispatcher it is given, under faults drawn from a seed.

Imports: base, wire, policy. Reading order: agenda (time), model (tokens and step times without math), faults (what goes wrong), worker
(one process), mover (its pages on the move), cluster (all of them, the wires between, and what must hold in the end).
"""
