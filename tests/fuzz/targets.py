"""The functions that read files and text of users, and malformed inputs for each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import strategies as st
from PIL import Image

import san
from experiments.config.expand import PROFILES_DIR, expand, profile_path
from experiments.config.grid import GridRequest, Trial
from experiments.evaluation.evaluate import open_checkpoint
from experiments.paper.tables import table_names
from experiments.runs.workspace import open_store
from pipelines.datasets.check import _Decoder
from pipelines.datasets.dataset import Dataset
from pipelines.datasets.manifest import HEADER as LIST_HEADER
from pipelines.datasets.manifest import write_list
from pipelines.datasets.pack import pack
from pipelines.datasets.shards import HEADER, _checksum, index_path
from tests.experiments.conftest import SMALL_GRID
from tests.fuzz.inputs import changed_bytes, changed_value, code_in_a_pickle, torch_file, yaml_text


@dataclass(frozen=True)
class Target:
    """A reader of user input."""

    name: str
    read: Callable[[Any], object]
    """Reads one input; may raise an error with a message for users."""
    inputs: st.SearchStrategy[Any]


def targets(folder: Path) -> list[Target]:
    """All targets; `folder` gets the files that they read."""
    grid = yaml.safe_load(SMALL_GRID.read_text())
    profile = yaml.safe_load((PROFILES_DIR / "digits.yaml").read_text())
    overrides = [f"{section}.{key}={value}" for section, keys in profile.items() for key, value in keys.items()]
    return [
        Target("grid", _file(folder / "grid.yaml", _expand), yaml_text(grid | {"product": {"recipe.lr": [0.1, 0.2]}})),
        Target("profile", profile_path, st.text() | st.sampled_from(["digits\0", "../grid", "imagenet/", "Digits"])),
        Target("override", _override, _changed_text(overrides)),
        Target("address", open_store, _changed_text(["s3://bucket/prefix?endpoint_override=http://host:9000"])),
        *_weights(folder),
        *_images(folder),
    ]


def _file(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Reads inputs as the content of a file, and checks that the file stays the same. Afterwards it has its first content."""
    valid = path.read_bytes() if path.exists() else b""

    def read_content(content: bytes) -> object:
        path.write_bytes(content)
        try:
            return read(path)
        finally:
            assert path.read_bytes() == content, f"{path} was modified"
            path.write_bytes(valid)

    return read_content


def _changed_text(valid: list[str]) -> st.SearchStrategy[str]:
    """Changed arguments of a command, which cannot contain null bytes."""
    changed = st.sampled_from(valid).flatmap(lambda text: changed_bytes(text.encode()))
    text = changed.map(lambda content: content.decode(errors="replace")) | st.text()
    return text.filter(lambda argument: "\0" not in argument)


def _override(text: str) -> object:
    return expand(GridRequest(SMALL_GRID, overrides=(text,)), table_names())


def _expand(path: Path) -> list[str]:
    configs = expand(GridRequest(path), table_names()).configs
    return [Trial("grid", "digits", row, 0, config, "digest").key for row, config in configs.items()]


def _weights(folder: Path) -> list[Target]:
    torch.manual_seed(0)
    model = san.create_model("san10_pairwise", 3, num_stages=2, width_mult=0.5)
    own, released = folder / "own.pt", folder / "released.pth"
    san.save_checkpoint(model, own)
    san.save_released_checkpoint(san.create_model("san10_patchwise", 3, num_stages=2, width_mult=0.5), released)
    ours, theirs = (torch.load(path, weights_only=True) for path in (own, released))
    marker = str(folder / "code-was-run")
    file = folder / "weights.pth"

    def load_released(path: Path) -> object:
        try:
            return san.load_released_checkpoint(path, "san10_patchwise", num_stages=2, width_mult=0.5)
        finally:
            assert not Path(marker).exists(), "unpickling ran code"

    return [
        Target("weights", _file(file, san.load_checkpoint), torch_file(ours)),
        Target("weights in `san evaluate`", _file(file, open_checkpoint), torch_file(ours)),
        Target("released weights", _file(file, load_released), torch_file(theirs) | code_in_a_pickle(marker)),
    ]


def _images(folder: Path) -> list[Target]:
    root = folder / "images"
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for number, kind in enumerate(("JPEG", "PNG")):
                image = Image.linear_gradient("L").resize((40, 30)).convert("RGB")
                image.save(root / split / name / f"{number}.{kind.lower()}", kind)
    shards = folder / "shards"
    for _ in pack(Dataset.scan(root, "train"), shards, 10_000_000, 1):
        pass
    index, (shard,) = index_path(shards, "train"), sorted(shards.glob("*.tar"))
    rows = index.read_text().split("\n")
    decoder = _Decoder()
    image_file = folder / "image"
    jpeg, png = ((root / "train" / "cat" / name).read_bytes() for name in ("0.jpeg", "1.png"))

    def with_checksum(lines: object) -> bytes:
        text = [str(line) for line in lines] if isinstance(lines, list) else [json.dumps(lines, default=str)]
        return "\n".join([f"{HEADER}{_checksum(text)}", *text]).encode(errors="replace")

    def open_packed(path: Path) -> object:
        dataset = Dataset.open_shards(shards, "train")
        return [dataset.encoded(number) for number in range(len(dataset))]

    listing = folder / "lists" / "train.txt"
    listing.parent.mkdir()
    whole = Dataset.scan(root, "train")
    write_list(listing, whole.paths, whole.sizes)
    names = listing.read_text().split("\n")[1:-1]

    def with_digest(lines: object) -> bytes:
        text = "".join(f"{line}\n" for line in lines) if isinstance(lines, list) else str(lines)
        hashed = "".join("\0".join(line.rsplit("\t", 1)) + "\n" for line in text.splitlines())
        return (LIST_HEADER + hashlib.sha256(hashed.encode(errors="replace")).hexdigest()[:16] + "\n" + text).encode(
            errors="replace"
        )

    def open_listed(path: Path) -> object:
        dataset = Dataset.open(root, "train", path.parent)
        return [dataset.source(number).read() for number in range(len(dataset))], dataset.digest()

    return [
        Target(
            "index of shards",
            _file(index, open_packed),
            changed_value(rows[1:]).map(with_checksum) | changed_bytes(index.read_bytes()),
        ),
        Target("shard", _file(shard, open_packed), changed_bytes(shard.read_bytes())),
        Target(
            "list", _file(listing, open_listed), changed_value(names).map(with_digest) | changed_bytes(listing.read_bytes())
        ),
        Target(
            "image",
            _file(image_file, lambda path: decoder.problem(Dataset.of_files([path]).source(0))),
            changed_bytes(jpeg) | changed_bytes(png),
        ),
    ]
