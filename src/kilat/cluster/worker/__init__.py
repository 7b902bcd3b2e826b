"""worker: one engine in a process of its own, driven over one socket.

Reading order: channel (the sockets), beat (signs of life), loop, main; what it is started with is in cluster/worker_config. Only ``__main__`` imports the real engine.
"""
