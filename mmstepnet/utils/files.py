"""Files that appear whole or not at all, and that processes wait for."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def write_whole(content: bytes | memoryview | str, path: str | Path) -> None:
    """Write to a file beside the target and rename it, so that a kill leaves the old one.

    Args:
        content: Text is written as UTF-8.
        path: The target; its folder is made.

    Raises:
        OSError: The disk is full, say. Nothing is left of the new file.
    """
    content = content.encode() if isinstance(content, str) else content
    temporary = f'{path}.tmp'
    os.makedirs(os.path.dirname(temporary) or '.', exist_ok=True)
    try:
        with open(temporary, 'wb') as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise


@contextlib.contextmanager
def one_at_a_time(folder: str | Path) -> Iterator[None]:
    """Let no other process (nor thread) do the same in this folder; waits until none does.

    Where the folder can't be written to, or its file system has no locks, nothing is waited for.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            file = stack.enter_context(open(os.path.join(folder, '.lock'), 'w'))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
