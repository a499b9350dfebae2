"""What the compiler made of a step: its program, its buffers and how long each lives."""
