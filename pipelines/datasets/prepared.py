"""Folders of prepared datasets, which appear only when they are complete."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelines.errors import DataError


def is_prepared(root: Path) -> bool:
    """Whether a folder has the splits train and val. Raises DataError if it contains something else."""
    if not root.is_dir() or not any(root.iterdir()):
        return False
    if not all((root / split).is_dir() for split in ("train", "val")):
        raise DataError(f"{root}: exists, but has no folders train and val; choose another folder")
    return True


@contextmanager
def unfinished_folder(root: Path) -> Iterator[Path]:
    """A path next to `root`, whose folder replaces `root` after the block, unless another process was faster."""
    root = root.resolve()  # a rename would replace a link
    root.parent.mkdir(parents=True, exist_ok=True)
    folder = root.with_name(f".{root.name}.{uuid.uuid4().hex}")
    try:
        yield folder
        try:
            os.rename(folder, root)  # replaces an empty folder
        except OSError:
            if not is_prepared(root):
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
