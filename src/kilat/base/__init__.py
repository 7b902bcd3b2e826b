"""base: what every room may use. Standard library only; no policy, no I/O loops, no torch.

Reading order: errors, ids, hashing, units, env, log.
"""
