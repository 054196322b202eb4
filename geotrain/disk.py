"""Durable, atomic files and what to say when the disk refuses. I/O."""

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from .errors import LocalError, UserError


@contextlib.contextmanager
def disk_errors(path: Path, what: str) -> Iterator[None]:
    """Turns what the operating system says while `what` is written into one line that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise LocalError(f"no space left for {what} at {path}; free some or choose another folder") from None
        raise LocalError(f"cannot write {what} at {path}: {error.strerror or error}") from None


def needs_folder(path: Path | None) -> None:
    """Before the work whose result goes into a file: raises `UserError` if there is no folder for it."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; make it first")


def sync_folder(path: Path) -> None:
    """Makes renames in a folder durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a small file so that a crash leaves the old one or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    with disk_errors(path, path.name):
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)


def hash_file(path: Path) -> str:
    """sha256 in hex, as `sha256sum` prints it.

    Cryptographic because shards may come from peers nobody trusts; sha256 because everybody can check it by
    hand and it keeps up with disks (1.7 GiB/s measured on one core with the SHA instructions).
    """
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
