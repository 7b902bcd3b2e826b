"""scale: how workers share out prefill and decode, and how many there are. Decides and performs nothing.

Imports: base, wire. Reading order: window (what is measured), config, pressure, roles (shares, and how many workers are wished for), headcount
(when some are started or ended).
"""
