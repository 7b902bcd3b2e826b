"""kilat: an LLM inference engine and serving system.

The map of the package is docs/architecture.md. Importing this module imports neither torch nor any service.
"""

__version__ = "0.1.0"
