"""CIFAR from tiny archives in the official format, over HTTP and from files."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from pipelines import DataError, Dataset, prepare_cifar
from pipelines.datasets import cifar

PER_FILE = 6


@contextmanager
def counting(what: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    done: list[int] = []
    yield done.append
    assert total is None or sum(done) == total


def images_of(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (PER_FILE, 3, 32, 32), np.uint8)


def packed(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """CIFAR-10 with 2 classes, 30 training and 6 validation images."""
    files = {}
    for seed, stem in enumerate(("test_batch", *(f"data_batch_{number}" for number in range(1, 6)))):
        rows = [bytes([number % 2]) + image.tobytes() for number, image in enumerate(images_of(seed))]
        files[f"cifar-10-batches-bin/{stem}.bin"] = b"".join(rows)
    return packed(tmp_path / "official.tar.gz", files | {"cifar-10-batches-bin/batches.meta.txt": b"airplane\ncat\n\n"})


def test_official_archive_keeps_pixels_and_classes(official: Path, tmp_path: Path) -> None:
    root = prepare_cifar(tmp_path / "cifar10", "cifar10", official, counting)
    assert [len(Dataset.scan(root, split)) for split in ("train", "val")] == [30, 6]
    assert Dataset.scan(root, "train").classes == ("airplane", "cat")
    for number, pixels_CHW in enumerate(images_of(0)):
        with Image.open(root / "val" / ("airplane", "cat")[number % 2] / f"test_batch_{number:05d}.png") as image:
            assert np.array_equal(np.asarray(image).transpose(2, 0, 1), pixels_CHW)


def test_cifar100_uses_the_fine_class(tmp_path: Path) -> None:
    content = b"".join(bytes([9, number % 2]) + image.tobytes() for number, image in enumerate(images_of(0)))
    names = {"c/fine_label_names.txt": b"apple\nbear\n", "c/coarse_label_names.txt": b"food\nanimals\n"}
    archive = packed(tmp_path / "a.tgz", names | {"c/train.bin": content, "c/test.bin": content})
    root = prepare_cifar(tmp_path / "cifar100", "cifar100", archive, counting)
    assert sorted(path.name for path in (root / "val").iterdir()) == ["apple", "bear"]


def test_extracted_official_archive(official: Path, tmp_path: Path) -> None:
    (tmp_path / "extracted").mkdir()
    subprocess.run(["tar", "-xf", official, "-C", tmp_path / "extracted"], check=True)
    roots = [
        prepare_cifar(tmp_path / str(number), "cifar10", source, counting)
        for number, source in enumerate((official, tmp_path / "extracted", tmp_path / "extracted/cifar-10-batches-bin"))
    ]
    for split in ("train", "val"):
        assert len({Dataset.scan(root, split).digest() for root in roots}) == 1


def test_rejects_the_archive_of_the_other_dataset(official: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"binary version of cifar100.* fine_label_names\.txt, test\.bin, train\.bin"):
        prepare_cifar(tmp_path / "cifar100", "cifar100", official, counting)


@pytest.mark.parametrize("suffix", ["gz", "xz", ""])
def test_rejects_a_truncated_archive(suffix: str, official: Path, tmp_path: Path) -> None:
    path = tmp_path / f"half.tar.{suffix}"
    with tarfile.open(official) as whole, tarfile.open(path, f"w:{suffix}") as tar:  # type: ignore[call-overload]
        for member in whole:
            tar.addfile(member, whole.extractfile(member))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=r"half\.tar.*cannot read"):
        prepare_cifar(tmp_path / "cifar10", "cifar10", path, counting)


def test_rejects_an_archive_without_some_files(official: Path, tmp_path: Path) -> None:
    """As one that was truncated between two files."""
    with tarfile.open(official) as whole, tarfile.open(tmp_path / "few.tar", "w") as tar:
        for member in whole.getmembers()[:3]:
            tar.addfile(member, whole.extractfile(member))
    with pytest.raises(DataError, match=r"few\.tar.*not all of it"):
        prepare_cifar(tmp_path / "cifar10", "cifar10", tmp_path / "few.tar", counting)


@pytest.mark.parametrize(
    ("file", "content"), [("batches.meta.txt", b""), ("data_batch_2.bin", b""), ("test_batch.bin", b"\xff" * 3073)]
)
def test_rejects_damaged_files(file: str, content: bytes, official: Path, tmp_path: Path) -> None:
    (tmp_path / "extracted").mkdir()
    subprocess.run(["tar", "-xf", official, "-C", tmp_path / "extracted"], check=True)
    (tmp_path / "extracted/cifar-10-batches-bin" / file).write_bytes(content)
    with pytest.raises(DataError, match=r"\.bin or batches\.meta\.txt is damaged"):
        prepare_cifar(tmp_path / "cifar10", "cifar10", tmp_path / "extracted", counting)
    assert not (tmp_path / "cifar10").exists()


@pytest.mark.parametrize("content", [b"no archive", None], ids=["damaged", "other content"])
def test_rejects_other_archives(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "wrong.tar.gz"
    if content is None:
        packed(path, {"cifar-10-batches-py/data_batch_1": b"pickled"})
    else:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"wrong\.tar\.gz: "):
        prepare_cifar(tmp_path / "cifar10", "cifar10", path, counting)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["wrong.tar.gz"]


@pytest.fixture
def server(official: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serves the archive, and breaks off in the middle of the first response."""
    content, responses = official.read_bytes(), iter([len(official.read_bytes()) // 2])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: next(responses, None)])

        def log_message(self, *arguments: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=http.serve_forever, daemon=True).start()
    url, md5 = f"http://127.0.0.1:{http.server_port}/archive.tar.gz", hashlib.md5(content).hexdigest()
    monkeypatch.setitem(cifar.CIFAR, "cifar10", replace(cifar.CIFAR["cifar10"], url=url, md5=md5))
    yield
    http.shutdown()
    http.server_close()


@pytest.mark.usefixtures("server")
def test_broken_download_is_deleted_and_repeated(tmp_path: Path) -> None:
    """A file of the user with its name stays."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "archive.tar.gz").write_bytes(b"of the user")
    with pytest.raises(DataError, match="damaged"):
        prepare_cifar(folder / "cifar10", "cifar10", None, counting)
    assert [path.name for path in folder.iterdir()] == ["archive.tar.gz"]
    root = prepare_cifar(folder / "cifar10", "cifar10", None, counting)
    assert len(Dataset.scan(root, "train")) == 30 and {path.name for path in folder.iterdir()} == {"archive.tar.gz", "cifar10"}


def test_without_a_connection(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(cifar.CIFAR, "cifar10", replace(cifar.CIFAR["cifar10"], url="http://127.0.0.1:9/archive.tar.gz"))
    with pytest.raises(DataError, match=r"archive\.tar\.gz: cannot download .* --from FILE"):
        prepare_cifar(tmp_path / "data" / "cifar10", "cifar10", None, counting)
    assert not list((tmp_path / "data").iterdir())
