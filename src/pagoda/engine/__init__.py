"""The engine loop around the scheduler and an executor, and what stands before and after it: text."""
