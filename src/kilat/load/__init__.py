"""load: where models come from (hub, package index, disk) and what their files say (config, weights).

Reading order: files, sources, catalogue, package_models, index, download, hub; config, gguf_config; weights, gguf_weights,
gguf_names, safetensors_weights, safetensors_header.
"""
