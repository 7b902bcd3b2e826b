"""scale: how running workers share out prefill and decode. Decides and performs nothing.

Imports: base, wire. Reading order: window (what is measured), config, roles (what is decided).
"""
