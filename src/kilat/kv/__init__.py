"""kv: moves pages between workers. A reader pulls; nobody writes into another worker's memory.

Reading order: transport (the contract), board (which moves are open), jobs (the reading thread), then local, shm, tcp, nixl, cuda_ipc;
links (which transport reaches whom); moves (the state of every move of one worker). Pages that left the pool: tier (the contract),
host_tier, disk_tier, tier_store (all of them, read as a peer is).
"""
