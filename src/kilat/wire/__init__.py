"""wire: every message between processes, as msgspec structs. No torch types, no dict payloads, no pickle.

Reading order: sampling (what a request asks for), session (the portable record), kv (pages on the move), messages (what gateway and worker say), codec.
"""

PROTOCOL_VERSION = 3
