"""The control plane: requests, blocks, the prefix cache, the scheduler. Standard library only."""
