"""The parser that the commands share."""

from __future__ import annotations

import argparse


def new_parser(command: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """A parser of `rlloop COMMAND`, whose texts stay as they are laid out. Options cannot be abbreviated."""
    return argparse.ArgumentParser(
        prog=f"rlloop {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
