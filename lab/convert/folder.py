"""A checkpoint's folder as a target: asked about before any work, filled beside its place, and named only when all of it is on disk.

Why apart from a file's way (`lab.artifacts.publish`): a folder cannot be linked, and replacing one means moving the old one aside first. Only what was
made here is ever removed, and an old folder only when the new one stands in its place.
What it does not prove: that what lies in the folder is a model; the caller opens it before the block ends.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from lab.artifacts.publish import aside_of, check_room, folders, publish_folder, sync_folder, taken
from lab.errors import LabError, flat

INDEX = "model.safetensors.index.json"
_OURS = ("config.json", "tokenizer.json", INDEX)
_FILES = (".safetensors", ".vqf", ".gguf")


def check_folder(target: Path, force: bool) -> None:
    """Raises LabError where `target` cannot become a folder, or is there and may not be replaced: without `force`, or with anything else in it."""
    if target.suffix.lower() in _FILES and not target.is_dir():
        raise LabError(f"{target}: --to safetensors writes a folder; name it without {target.suffix}")
    if not os.path.lexists(target):
        return check_room(target, 0)
    if not force:
        raise taken(target)
    other = [] if not target.is_dir() else sorted(p.name for p in target.iterdir() if p.name not in _OURS and p.suffix != ".safetensors")
    if target.is_symlink() or not target.is_dir() or other:
        raise LabError(f"{target}: {f'holds {other[0]}, which is no part of a checkpoint' if other else 'no folder'}; --force does not replace it")
    return check_room(target, 0)


@contextmanager
def new_folder(target: Path, force: bool) -> Iterator[Path]:
    """A folder beside `target` that takes its name when the block ends well, on disk by then; removed after any exception, and the old one is as it was.

    Raises LabError for what `check_folder` finds at the end, and for the disk's errors.
    """
    folder = aside_of(target)
    try:
        with folders(target.parent):
            folder.mkdir()
            try:
                yield folder
                _settle(folder)
                check_folder(target, force)
                _publish(folder, target)
                sync_folder(target.parent)
            finally:
                shutil.rmtree(folder, ignore_errors=True)  # after a success it has its name
    except (OSError, SafetensorError) as error:
        raise LabError(f"{target}: cannot be written ({flat(getattr(error, 'strerror', None) or error)}); nothing was left behind") from None


def _settle(folder: Path) -> None:
    """Gives every file the mode that the system gives new files (safetensors writes 0600), and waits until the disk has it."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for file in folder.iterdir():
        file.chmod(mode)
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    sync_folder(folder)


def _publish(folder: Path, target: Path) -> None:
    if not target.exists():
        return publish_folder(folder, target)
    old = aside_of(target, "old")
    os.rename(target, old)
    try:
        publish_folder(folder, target)
    except BaseException:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)
    return None
