"""text: between characters and token ids. No torch, no clock, no sockets; everything here is a function of its inputs.

Reading order: tokenizer (and gguf_tokenizer), stops, detokenize, calls, message, chat, sandbox, template.
"""
