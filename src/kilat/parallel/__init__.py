"""parallel: the device mesh and its collectives. Layers take a Mesh argument; with one rank every collective is the identity."""
