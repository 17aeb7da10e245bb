"""Measuring: kernels alone, and steps of a whole model, beside what the machine can do."""
