"""gateway: HTTP in, text out. No torch anywhere below here.

Reading order: protocol and params (what a client may ask), prompt (text to token ids), sessions and link (the worker's side),
sample and generation (events to text), chat and completions with stream (text to JSON and SSE), then access, health, metrics, app.
"""
