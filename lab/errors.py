"""The two ways the lab says no.

`LabError` is a wrong command, config or file: one line that names the key or file and the fix, exit code 2.
`GapError` is a cell that cannot be measured: it becomes a recorded gap with a status, exit code 3. Neither is a bug; a bug keeps its traceback.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lab.record import Status

_ADVICE = re.compile(
    r"Search for `|(CUDA|HIP) kernel errors might be|For debugging consider passing|Compile with `TORCH_USE_|Device-side assertion tracking was not"
)
"""Lines of c10/cuda/CUDAException.cpp and CUDAMiscFunctions.cpp, which say nothing of what happened."""


class LabError(Exception):
    """A wrong command, config or file. The message is one line and names what to change. Exit code 2."""


class ArtifactRefusedError(LabError):
    """A whole file that must not be run as it is: a cell of it ends as ARTIFACT_REFUSED, and `lines` show a person why."""

    @property
    def lines(self) -> list[str]:
        """The comparison behind the refusal."""
        return []


class GapError(Exception):
    """A cell that cannot be measured as asked; ends as a record with `status`, exit code 3."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


def flat(text: object, most: int = 300) -> str:
    """`text` as one line of at most `most` characters: messages of libraries come in several. What torch advises after every error of a GPU is left out."""
    return " ".join(word for line in str(text).splitlines() if not _ADVICE.match(line.strip()) for word in line.split())[:most]
