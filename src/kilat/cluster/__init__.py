"""cluster: the processes of a deployment and what runs between them.

Reading order: config, gateway/ (HTTP in, text out), worker/ (one engine in a process), supervise, launch.
Only ``worker/`` may import the engine; the rest runs where torch is not installed.
"""
