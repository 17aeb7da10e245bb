"""Backends run programs: `reference` in numpy, `cpu` in native code."""
