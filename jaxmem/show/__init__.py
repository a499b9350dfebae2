"""People look here: plans, reports and trees as terminal text and as notebook HTML."""

from jaxmem.show.trees import tree

__all__ = ["tree"]
