"""`python -m rlloop`, the same as the `rlloop` command."""

import sys

from rlloop.cli.main import main

sys.exit(main())
