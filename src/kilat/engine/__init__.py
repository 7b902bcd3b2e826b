"""engine: the bridge between what decides (policy) and what computes (models, ops).

Reading order: config, core (the loop), runner (one step), inputs, sampler, kv_memory, grammar, build; timeline, work and utilisation watch it.
"""
