"""`python -m rlloop`, the same as the `rlloop` command."""

import sys

from rlloop.cli import main

sys.exit(main())
