"""Reading model files: GGUF, and names of models to files on disk."""
