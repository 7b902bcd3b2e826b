"""ops: one file per op with its contract and torch reference; faster versions in ops/cpu and ops/triton, same stem.

Reading order: batch (what a step looks like), kernels (the set that is chosen once and passed on), then any op.
An op never reads configuration, never allocates state, and never synchronises a device.

Every op promises batch invariance unless its contract says otherwise: a row's result has the same bits whatever other rows are in
the batch and however the row's tokens were cut into chunks.
"""
