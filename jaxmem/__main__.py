"""``python -m jaxmem`` is the command line."""

import sys

from jaxmem.cli import main

if __name__ == "__main__":
    sys.exit(main())
