"""The key of a trial depends on the files of relations that a user has added."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

from experiments.grids.custom_code import custom_code
from experiments.grids.expand import GRIDS_DIR
from experiments.grids.grid import Trial
from san.models import model_spec
from san.nn.attention import TRANSFORMATIONS
from san.nn.mapping import MAPPINGS, Mapping
from san.nn.relation import PAIRWISE, Relation
from tests.experiments.grids.test_grid import error_message, expand

FILE = """
    from san import ops

    def double(phi, psi, footprint):
        return 2 * ops.subtraction(phi, psi, footprint)

    class Scaled:
        def __call__(self, phi, psi, footprint):
            return double(phi, psi, footprint)
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Imports a user's file and returns its names."""

    def load(text: str) -> dict[str, Any]:
        path = tmp_path / "mine.py"
        path.write_text(dedent(text))
        module = ModuleType("mine")
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, "mine", module)
        exec(compile(path.read_text(), path, "exec"), module.__dict__)
        return module.__dict__

    return load


def _trial(relation: str = "subtraction") -> Trial:
    return expand(GRIDS_DIR / "relation.yaml", "model.name=san10_pairwise", f"model.relation={relation}")["pairwise_summation"]


FORMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a function": lambda names: names["double"],
    "a cached function": lambda names: functools.cache(names["double"]),
    "a partial function": lambda names: functools.partial(names["double"], footprint=3),
    "an object": lambda names: names["Scaled"](),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_edit_of_the_file_changes_the_key(
    form: str, load: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PAIRWISE, "double", PAIRWISE["summation"])

    def key(text: str) -> str:
        monkeypatch.setitem(PAIRWISE, "double", Relation(PAIRWISE["summation"].channels, FORMS[form](load(text))))
        return _trial("double").key

    first = key(FILE)
    assert key(FILE.replace("2 *", "3 *")) != first
    assert key(FILE) == first  # its finished trials are found again


def test_operators_of_the_paper_need_no_source() -> None:
    specs = [trial.config.model.spec() for path in GRIDS_DIR.glob("*.yaml") for trial in expand(path).values()]
    assert [custom_code(spec) for spec in specs] == [{}] * len(specs)


def test_replaced_operator_of_the_paper_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _trial().key
    monkeypatch.setitem(MAPPINGS, "LRL", Mapping(lambda hidden: (hidden // 2,), lambda R, G: (G,)))
    assert _trial().key != plain


def test_row_without_functions_is_known_by_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for roles in (("phi", "beta", "beta"), ("beta", "psi", "beta")):
        monkeypatch.setitem(TRANSFORMATIONS, "mine", roles)
        digests.append(custom_code(model_spec("san10_pairwise", {"transformation": "mine"}))["transformation"])
    assert digests[0] != digests[1]


def test_rejects_code_that_is_in_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    exec("def typed(phi, psi, footprint): return phi", names)
    monkeypatch.setitem(PAIRWISE, "typed", Relation(lambda R, K: R, names["typed"]))  # type: ignore[arg-type]
    assert "cannot read the source of typed" in error_message(lambda: _trial("typed"))
    assert custom_code(model_spec("resnet26")) == {}
