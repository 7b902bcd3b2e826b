"""quant: storage formats of weights and how they become numbers."""
