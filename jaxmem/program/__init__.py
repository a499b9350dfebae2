"""What a step does: operations in order, loops as nested programs."""
