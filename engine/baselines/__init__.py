"""The systems that QEvict is compared with, each with real storage and true bytes.

Import from `engine.baselines.registry`: `systems()`, `make()`.
"""
