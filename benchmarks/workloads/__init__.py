"""Train steps of well-known models, for JAX and for PyTorch, with the same shapes and dtypes."""
