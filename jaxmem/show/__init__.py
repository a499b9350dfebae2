"""People look here: plans and reports as terminal text and as notebook HTML."""
