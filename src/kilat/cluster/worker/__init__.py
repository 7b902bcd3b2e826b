"""worker: one engine in a process of its own, driven over one socket.

Reading order: channel (the sockets), beat (signs of life), engine (what is needed of one), loop, offers (pages that leave), arrivals (pages that
come), mover (both), roads (over which transports), tiers and tier_files (pages that left the pool), main; what it is started with is in cluster/worker_config. Only ``__main__`` imports the real engine.
"""
