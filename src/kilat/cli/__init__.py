"""cli: `kilat serve | chat | run | bench | model | doctor`. May import every room, but only when a command
needs it.

Reading order: main (the table of commands and flags), options (what a flag accepts), then one file per
command. ``server`` starts a server in a child process, ``client`` talks to any OpenAI-compatible server;
chat, run and bench use these two and nothing else.
"""
