"""nn: the blocks that models are made of. Plain objects with ``__call__``; weights are packed once, at construction.

Reading order: build (what every block gets), linear, norm, rotary, attention, mlp, decoder.
"""
