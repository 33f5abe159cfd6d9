"""Private folders for files that later processes execute or trust: only this user may write into them.

Compiled kernels are read with pickle, so anyone who can add a file to them can run code as this user.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)


def private(folder: Path) -> Path:
    """Create the folder, with missing parents, for this user only.

    Raises `OSError` if that fails, or if others may write into it: it belongs to another user, its mode allows a group
    or everybody to write, or everybody may replace it through a parent folder. Root, and groups that own a parent
    folder, are trusted. Access control lists (ACLs) are not checked.
    """
    if not folder.parent.exists():
        private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    me = os.geteuid()
    for status in (folder.lstat(), folder.stat()):  # a link, too
        if status.st_uid != me:
            raise PermissionError(None, f"it belongs to user {status.st_uid}, and this process is user {me}'s")
    if folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(None, f"others may write into it: chmod go-w {folder}")
    for above in {*folder.absolute().parents, *folder.resolve().parents}:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError(None, f"everybody may write into {above}, and so replace it")
    if not os.access(folder, os.W_OK):
        raise PermissionError(None, "it is read-only")
    return folder


def kernel_folder(name: str) -> Path:
    """The folder of compiled kernels: the environment's NUMBA_CACHE_DIR, or kernels/ in its RLLOOP_CACHE or
    ~/.cache/rlloop. If that is not private, a temporary folder of this user, with a warning; if that is not private
    either, one that is deleted with the process."""
    numba_cache, own = os.environ.get("NUMBA_CACHE_DIR"), os.environ.get("RLLOOP_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    top = Path(numba_cache or own or home / "rlloop")
    shared = Path(tempfile.gettempdir()) / f"rlloop-{os.geteuid()}"
    for root in (top, shared):
        try:
            inside = private(root) if numba_cache and root is top else private(private(root) / "kernels")
            return private(inside / name)
        except OSError as error:
            log.warning(
                "compiled kernels are not kept in %s: %s. RLLOOP_CACHE names another folder", root, error.strerror
            )
    folder = Path(tempfile.mkdtemp(prefix="rlloop-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
