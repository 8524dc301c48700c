"""Tar shards: contents, resumed packing, damaged shards, and the same training as from folders."""

import hashlib
import os
import re
import tarfile
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import DataError, Dataset, Loader, Transform
from pipelines.datasets.pack import Packed, pack
from tests.pipelines.datasets.test_check import picture
from tests.pipelines.datasets.test_dataset import put


def folder_of(root: Path, sizes: list[int]) -> Dataset:
    """Writes a split of three classes; its files have these sizes and random contents."""
    for index, size in enumerate([1, 1, 1, *sizes]):
        path = root / f"train/{'abc'[index % 3]}/{index:02d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(np.random.default_rng(index).bytes(size))
    return Dataset.scan(root, "train")


def packed(data: Dataset, out: Path, shard_bytes: int = 6000, workers: int = 2) -> list[Packed]:
    return sorted(pack(data, out, shard_bytes, workers), key=lambda one: one.shard.name)


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    return folder_of(tmp_path / "images", [700 * (index % 5) + 90 for index in range(20)])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@settings(max_examples=settings.default.max_examples // 4)
@given(
    sizes=st.lists(st.integers(1, 4000), min_size=1, max_size=12),
    shard_bytes=st.integers(1, 20_000),
    workers=st.integers(1, 3),
)
def test_shards_hold_every_image_once_and_in_order(sizes: list[int], shard_bytes: int, workers: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = folder_of(Path(folder) / "images", sizes)
        shards = packed(data, Path(folder) / "out", shard_bytes, workers)
        opened = Dataset.open_shards(Path(folder) / "out", "train")
        assert (opened.classes, opened.paths) == (data.classes, data.paths)
        assert (opened.labels, opened.sizes) == (data.labels, data.sizes)
        assert opened.digest() == data.digest()
        for index in range(len(data)):
            assert opened.encoded(index).tobytes() == opened.source(index).read() == data.source(index).read()
        assert sum(one.images for one in shards) == len(data)
        for one in shards:
            path = Path(folder) / "out" / one.shard.name
            assert path.stat().st_size == one.shard.bytes <= max(shard_bytes, 0 if one.images > 1 else 10**9)
            assert hashlib.sha256(path.read_bytes()).hexdigest() == one.shard.sha256


def test_tarfile_reads_shards(data: Dataset, out: Path) -> None:
    shards = packed(data, out)
    assert len(shards) > 3
    index = 0
    for one in shards:
        with tarfile.open(out / one.shard.name) as tar:
            members = tar.getmembers()
            for image, label in zip(members[::2], members[1::2], strict=True):
                assert (image.name, label.name) == (f"{index:08d}.jpeg", f"{index:08d}.cls")
                assert tar.extractfile(image).read() == data.source(index).read()  # type: ignore[union-attr]
                assert int(tar.extractfile(label).read()) == data.labels[index]  # type: ignore[union-attr]
                index += 1
    assert index == len(data)


def test_names_of_images_contain_shard_and_member(data: Dataset, out: Path) -> None:
    packed(data, out)
    opened = Dataset.open_shards(out, "train")
    assert opened.packed
    last = len(data) - 1
    assert opened.name_of(0) == f"{out}/train-00000.tar: 00000000.jpeg (train/a/00.JPEG)"
    assert opened.name_of(last).endswith(f".tar: {last:08d}.jpeg ({data.paths[last]})")
    _, held = opened.hold_out(1)
    assert [held.encoded(index).tobytes() for index in range(3)] == [held.source(index).read() for index in range(3)]
    assert held.paths == data.hold_out(1)[1].paths and held.digest() == data.hold_out(1)[1].digest()


def test_threads_share_files_which_are_closed_at_the_end(data: Dataset, out: Path) -> None:
    def open_files() -> list[Path]:
        links = (path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
        return sorted(link for link in links if link.parent == out)

    packed(data, out)
    opened = Dataset.open_shards(out, "train")
    opened.prefetch(range(len(data)))
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(opened.encoded, [*range(len(data))] * 20))
    assert [image.tobytes() for image in read] == [data.source(index).read() for index in range(len(data))] * 20
    assert open_files() == sorted(out.glob("*.tar"))
    del opened
    assert not open_files()


def test_shards_are_reproducible(data: Dataset, out: Path, tmp_path: Path) -> None:
    packed(data, out, workers=1)
    packed(data, tmp_path / "again", workers=3)
    files = sorted(path.name for path in out.iterdir())
    assert files == sorted(path.name for path in (tmp_path / "again").iterdir())
    assert all((out / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in files)


def test_complete_shards_are_kept_and_others_rejected(data: Dataset, out: Path) -> None:
    def times() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}

    packed(data, out)
    before = times()
    assert all(one.kept for one in packed(data, out))
    for other, size in ((data, 20_000), (data.without([0]), 6000)):
        with pytest.raises(DataError, match="already holds shards of train"):
            packed(other, out, size)
    assert times() == before and len(Dataset.open_shards(out, "train")) == len(data)
    (out / "train-00001.tar").rename(out / "kept")
    with pytest.raises(DataError, match=r"cannot read train-00001\.tar on node"):
        packed(data, out)
    (out / "kept").rename(out / "train-00001.tar")
    (out / "train.index").unlink()
    with pytest.raises(DataError, match="already holds shards of train"):
        packed(data, out)


def test_interrupted_packing_leaves_nothing(data: Dataset, out: Path) -> None:
    begun = pack(data, out, 6000, 1)
    next(begun)
    begun.close()
    assert not list(out.iterdir())
    assert not any(one.kept for one in packed(data, out))


def test_splits_can_share_a_folder(data: Dataset, out: Path) -> None:
    put(data.root, "train-split/a/1.jpg", "val/a/1.jpg")
    others = [Dataset.scan(data.root, split) for split in ("train-split", "val")]
    for one in (data, *others, data):
        packed(one, out)
    assert [len(Dataset.open_shards(out, split)) for split in ("train", "train-split", "val")] == [23, 1, 1]


def test_rejects_a_second_process(data: Dataset, out: Path) -> None:
    begun = pack(data, out, 6000, 1)
    next(begun)
    with pytest.raises(DataError, match=r"\.train\.part: another process"):
        packed(data, out)
    assert len(list(begun)) > 1 and len(Dataset.open_shards(out, "train")) == len(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [(Path.unlink, "No such file"), (lambda path: path.write_bytes(b"x"), "1 bytes, but 790 when")],
)
def test_packing_stops_at_a_changed_image(data: Dataset, out: Path, change: Callable[[Path], object], words: str) -> None:
    change(data.root / "train/b/04.JPEG")
    with pytest.raises(DataError, match=rf"train/b/04\.JPEG: .*{words}"):
        packed(data, out, 10**6)
    assert not list(out.iterdir())


def test_rejects_the_index_of_another_split(data: Dataset, out: Path) -> None:
    packed(data, out)
    (out / "train.index").rename(out / "val.index")
    with pytest.raises(DataError, match=r"val\.index: .*train/"):
        Dataset.open_shards(out, "val")


def test_rejects_shards_larger_than_the_free_space(data: Dataset, out: Path) -> None:
    endless = Dataset(data.root, data.split, data.classes, data.paths, data.labels, (2**60,) * len(data))
    with pytest.raises(DataError, match=r"\d+ bytes are free"):
        packed(endless, out)


@pytest.mark.parametrize("name", ["train-00001.tar", "train.index"])
def test_rejects_a_damaged_file(data: Dataset, out: Path, name: str) -> None:
    packed(data, out)
    (out / name).write_bytes((out / name).read_bytes().rstrip(b"\n")[:-1])
    with pytest.raises(DataError, match=re.escape(name)):
        Dataset.open_shards(out, "train")


@pytest.mark.parametrize("read_before", [False, True])
def test_error_names_a_shard_that_was_truncated_after_opening(data: Dataset, out: Path, read_before: bool) -> None:
    packed(data, out, 10**6)
    opened = Dataset.open_shards(out, "train")
    if read_before:
        opened.encoded(0)
    os.truncate(out / "train-00000.tar", 700)
    with pytest.raises(DataError, match=r"train-00000\.tar .*only 700 bytes"):
        opened.encoded(20)


PIXELS = Transform(size=12, resize=14, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


@pytest.mark.parametrize("train", [True, False])
def test_shards_give_the_same_batches_as_the_folder(train: bool, tmp_path: Path) -> None:
    for index in range(13):
        path = tmp_path / f"train/{'abc'[index % 3]}/{index:02d}.{'jpg' if index % 2 else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(17 + 3 * index, 60 - 4 * index).rotate(20 * index).save(path)
    data = Dataset.scan(tmp_path, "train")
    packed(data, tmp_path / "out", 8000)
    for rank in range(2):
        folder, shards = (
            Loader(images, PIXELS, train=train, batch_size=5, rank=rank, world_size=2, threads=2).epoch(1)
            for images in (data, Dataset.open_shards(tmp_path / "out", "train"))
        )
        for ours, theirs in zip(folder, shards, strict=True):
            assert torch.equal(ours.images_NCHW, theirs.images_NCHW)
            assert torch.equal(ours.labels_N, theirs.labels_N)
