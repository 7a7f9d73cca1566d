"""``python -m lazyinline``: the same as the command ``lazyinline``."""

import sys

from lazyinline_command.main import main

if __name__ == "__main__":
    sys.exit(main())
