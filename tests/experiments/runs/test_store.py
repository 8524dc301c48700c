"""What folders and buckets have in common."""

from pathlib import Path

import pytest

from experiments.runs.store import Store


def test_files_round_trip(store: Store) -> None:
    assert store.names("deep") == []
    assert store.read("deep/a") is None
    store.delete("deep/a")
    for content in (b"", b"first", bytes(range(256)) * 50_000):
        store.write("deep/a", content)
        assert store.read("deep/a") == content
    store.write("deep/er/b", b"")
    assert store.names("deep") == ["deep/a"]
    assert store.uri("deep/a").partition("?")[0].endswith("/deep/a")
    store.delete_folder("deep")
    assert store.names("deep") == store.names("deep/er") == []


def test_uploaded_file_is_downloaded(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = store.folder / "logs/a.log"
    here.parent.mkdir(parents=True)
    here.write_text("first line")
    store.upload(here)
    monkeypatch.setenv("SAN_SCRATCH", str(tmp_path / "another node"))
    store.download(store.folder / "logs/a.log")
    assert (store.folder / "logs/a.log").read_text() == "first line"
    store.write("logs/a.log", b"of another node")
    store.download(store.folder / "logs/a.log")
    assert (store.folder / "logs/a.log").read_text() == "of another node"
