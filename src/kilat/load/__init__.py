"""load: where models come from (hub, package index, disk) and what their files say (config, weights).

Reading order: sources, catalogue, index, download, hub; config, gguf_config; weights, safetensors_header, gguf_names.
"""
