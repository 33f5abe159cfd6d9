"""Commands of a page, one after the other in one process: `python commands.py FILE`, a JSON list of lists of words.

`rlloop` is the package that Python's path finds; `python` is this interpreter.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import rlloop
from rlloop.cli.main import main

if __name__ == "__main__":
    print(f"rlloop lies in {Path(rlloop.__file__).parents[1]}")
    sys.path[0] = ""  # as of `rlloop`: this script's folder is not on its path
    for program, *arguments in json.loads(Path(sys.argv[1]).read_text()):
        print("$", program, *arguments, flush=True)
        assert program in ("python", "rlloop")
        code = main(arguments) if program == "rlloop" else subprocess.call([sys.executable, *arguments])
        if code:
            sys.exit(f"{program} {' '.join(arguments)}: exit code {code}")
