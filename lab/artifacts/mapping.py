"""A file's bytes without reading them: how GGUF and VQF files are opened.

What it does not prove: that nobody changes the file while it is used; a run checks size and time of change of its files again.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from lab.errors import LabError


def mapped(path: Path) -> mmap.mmap:
    """The file, to be read only. Raises LabError for what is empty, no regular file (a pipe would be waited for), or cannot be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # not blocking: opening a pipe would wait for its writer
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise LabError(f"{path}: cannot be read ({'a folder' if stat.S_ISDIR(found.st_mode) else 'no regular file'})")
            if not found.st_size:
                raise LabError(f"{path}: empty file")
            return mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(handle)
    except (OSError, ValueError) as error:
        raise LabError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
