"""Make a schedule run: written-out operations in, a JAX function out."""
