"""Executors without a model: simulations on a virtual clock, and scripts for tests."""
