"""models: one file per architecture, named after the ``model_type`` of its Hugging Face config.

A model file reads the config (loudly: a field that changes the math and is not understood is an error) and names the blocks.
"""
