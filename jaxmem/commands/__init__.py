"""The commands of the command line, a file each.

A command is a module with ``HELP`` (one line), ``add(parser)``, which declares its options, and
``run(options)``, which returns its exit code. Nothing here imports jax before a command needs it.
"""
