"""How a finished file gets its name: never over something that is there, unless replacing was asked for, and with nothing left where it fails.

Why a link and not a rename: a rename replaces silently, so that of two conversions to one name both would end well and one would be lost. link(2) fails where
the name exists. What is still being written has a name of its own with a random part, since process numbers repeat in containers.
What it does not prove: that a process that is killed outright (SIGKILL, no power) leaves nothing; its `.NAME.*.partial` stays and may be deleted.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lab.errors import LabError


def aside_of(path: Path, word: str = "partial") -> Path:
    """A name beside `path` that nobody else takes."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.{word}")


def taken(path: Path) -> LabError:
    """The error about a name that exists."""
    return LabError(f"{path} exists; choose another name or say --force")


def check_target(path: Path, force: bool) -> None:
    """Asked before any work. Raises LabError where `path` cannot become a file: it exists (without `force`), or is or lies in something else."""
    if path.is_dir():
        raise LabError(f"{path} is a folder; name a file in it")
    if os.path.lexists(path):
        if not force:
            raise taken(path)
        if not path.is_file():
            raise LabError(f"{path} is no regular file; --force does not replace it, choose another name")
    check_room(path, 0)


def check_room(path: Path, nbytes: int) -> None:
    """Raises LabError where the folder of `path` cannot be made or written, or its disk has fewer than `nbytes` free."""
    folder = next(each for each in (path.parent, *path.parent.parents) if each.exists() or each == each.parent)
    if not folder.is_dir():
        raise LabError(f"{path}: {folder} is no folder; choose another name")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise LabError(f"{path}: {folder} may not be written; choose another folder")
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise LabError(f"{path}: needs {nbytes} bytes, {folder} has {free} free; make room or write elsewhere")


@contextmanager
def folders(folder: Path) -> Iterator[None]:
    """Makes `folder`, and takes away again what it made when the block fails. Raises OSError."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for each in missing:
            with suppress(OSError):  # not made, or somebody has put something into it
                each.rmdir()
        raise


def publish(aside: Path, path: Path, force: bool) -> None:
    """Gives the file `aside` the name `path` in one step. Raises LabError where it exists by now (without `force`), OSError from the disk."""
    if force:
        os.replace(aside, path)
        return
    try:
        os.link(aside, path)
    except FileExistsError:
        raise taken(path) from None
    except OSError:
        _claimed(aside, path)
    else:
        aside.unlink()


def publish_folder(aside: Path, path: Path) -> None:
    """The same for a folder, which must not exist."""
    try:
        path.mkdir()
    except FileExistsError:
        raise taken(path) from None
    try:
        os.rename(aside, path)  # takes the place of an empty folder only
    except BaseException:
        path.rmdir()
        raise


def sync_folder(folder: Path) -> None:
    """Waits until the disk has the names in `folder`. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _claimed(aside: Path, path: Path) -> None:
    """For file systems without links: takes the name with an empty file, which only one can, and replaces it."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        raise taken(path) from None
    try:
        os.replace(aside, path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
