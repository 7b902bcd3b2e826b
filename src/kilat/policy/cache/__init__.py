"""cache: which page of KV memory holds what. Page ids only; the memory itself belongs to the engine.

Imports: base, wire. Reading order: pool (owners, content index, eviction), table (the pages of one session),
pins (pages that moves own), changes (news of the index).
"""
