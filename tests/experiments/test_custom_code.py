"""A key changes with the code of a relation that a user has added, and with nothing else."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

from experiments.custom_code import OURS, REGISTRIES, custom_code
from experiments.grid import Trial
from experiments.job import GRIDS_DIR
from san.models import model_spec
from san.nn.mapping import MAPPINGS, Mapping
from san.nn.relation import PAIRWISE, Relation
from tests.experiments.test_grid import expand, told

FILE = """
    import torch
    from san import ops

    SCALE = 1.0

    def _pairs(psi, footprint):
        return ops.unfold(psi, footprint)

    def maximum(phi, psi, footprint):
        return SCALE * torch.maximum(phi.flatten(2).unsqueeze(2), _pairs(psi, footprint))

    def unrelated():
        return 1
"""


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The key of a trial whose relation lies in a file of its own, after a change of that file."""
    monkeypatch.setitem(PAIRWISE, "maximum", PAIRWISE["summation"])

    def of(*change: str) -> str:
        module = _module(tmp_path / "mine.py", dedent(FILE).replace(*change) if change else dedent(FILE))
        monkeypatch.setitem(PAIRWISE, "maximum", Relation(lambda R, K: R, module.maximum))
        return _trial("maximum").key

    return of


def _module(path: Path, text: str) -> ModuleType:
    assert not path.exists() or path.read_text() != text, "nothing was changed"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("mine", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    importlib.import_module("linecache").checkcache()
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def _trial(relation: str = "subtraction") -> Trial:
    return expand(GRIDS_DIR / "relation.yaml", "model.name=san10_pairwise", f"model.relation={relation}")["pairwise_summation"]


@pytest.mark.parametrize(
    "change",
    [
        ("torch.maximum", "torch.minimum"),
        ("ops.unfold(psi, footprint)", "ops.unfold(-psi, footprint)"),
        ("SCALE = 1.0", "SCALE = 2.0"),
    ],
    ids=["the function", "what it calls", "a constant that it reads"],
)
def test_another_code_is_another_key(change: tuple[str, str], key: Callable[..., str]) -> None:
    assert key() != key(*change)


def test_code_that_is_not_used_changes_no_key(key: Callable[..., str]) -> None:
    assert key() == key("return 1", "return 2")


def test_the_paper_has_all_rows_and_they_need_no_source() -> None:
    assert {field: {name for registry in registries for name in registry} for field, registries in REGISTRIES.items()} == OURS
    specs = [trial.config.model.spec() for path in GRIDS_DIR.glob("*.yaml") for trial in expand(path).values()]
    assert [custom_code(spec) for spec in specs] == [{}] * len(specs)


def test_a_replaced_row_of_the_paper_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _trial().key
    monkeypatch.setitem(MAPPINGS, "LRL", Mapping(lambda hidden: (hidden // 2,), lambda R, G: (G,)))
    assert _trial().key != plain


def test_code_without_a_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, object] = {}
    exec("def typed(phi, psi, footprint): return phi", names)
    monkeypatch.setitem(PAIRWISE, "typed", Relation(lambda R, K: R, names["typed"]))  # type: ignore[arg-type]
    said = told(lambda: _trial("typed"))
    assert "the source of typed cannot be read" in said
    assert custom_code(model_spec("resnet26")) == {}
