"""route: which worker computes a prompt, which one goes on with it, and whose pages save work. Decides and performs nothing.

Imports: base, wire. Reading order: views (what goes in and out), index (who holds which pages), loads (who has been given what), costs
(seconds out of measured rates), router (filter, score, pick).
"""
