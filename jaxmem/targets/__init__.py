"""What the hardware can do: targets by name or measured here, and compiling for them."""

from jaxmem.targets.compiling import Compiled, CompiledMemory, compile_for
from jaxmem.targets.target import Target

__all__ = ["Compiled", "CompiledMemory", "Target", "compile_for"]
