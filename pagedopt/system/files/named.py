"""Small files that users name, which may be anything: a pipe, a device, or a file of many GiB."""

from __future__ import annotations

import os
import stat

#: The most bytes that are read of such a file; a report of ``pagedopt doctor`` has some thousands.
LIMIT = 1 << 20


def read_small(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file; never waits for a writer.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no regular file, or larger than :data:`LIMIT`; the text begins with ``path``.
    """
    name = os.fspath(path)
    with open(path, "rb", opener=lambda file, flags: os.open(file, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{name}: no regular file, but a pipe or a device; write its content to a file")
        if len(content := file.read(LIMIT + 1)) > LIMIT:
            raise ValueError(f"{name}: more than {LIMIT:,} bytes, the most that are read of such a file")
    return content
