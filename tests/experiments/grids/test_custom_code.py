"""A key changes with the code of a relation that a user has added, and with nothing else."""

from __future__ import annotations

import linecache
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent
from types import ModuleType

import pytest

from experiments.grids.custom_code import OURS, REGISTRIES, custom_code
from experiments.grids.expand import GRIDS_DIR
from experiments.grids.grid import Trial
from san.models import model_spec
from san.nn.mapping import MAPPINGS, Mapping
from san.nn.relation import PAIRWISE, Relation
from tests.experiments.grids.test_grid import error_message, expand

FILE = """
    import functools
    import torch
    from san import ops
    import helpers_of_test as helpers

    SCALE = 1.0
    TABLE = {"a": {"one", "two", "three"}, "f": lambda x: x + 1}
    SHIFTS = torch.arange(3.0)

    def _pairs(psi, footprint):
        return ops.unfold(psi, footprint)

    @functools.cache
    def _cached(x):
        return x - 1

    class Base:
        def twice(self, x):
            return 2 * x

    class Scaled(Base):
        def __call__(self, x):
            return self.twice(x) * SCALE

    SCALED = Scaled()
    PARTIAL = functools.partial(torch.add, alpha=3)

    def maximum(phi, psi, footprint):
        TABLE, SHIFTS, _cached(1), SCALED(1.0), PARTIAL(psi, psi), helpers.help(1)
        return SCALE * torch.maximum(phi.flatten(2).unsqueeze(2), _pairs(psi, footprint))

    def unrelated():
        return 1
"""
HELPERS = """
    FACTOR = 3

    def help(x):
        return FACTOR * x
"""


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The key of a trial whose relation lies in a file of its own, after a change of that file or of one that it imports."""
    monkeypatch.setitem(PAIRWISE, "maximum", PAIRWISE["summation"])

    def of(old: str = "", new: str = "") -> str:
        assert old in FILE + HELPERS
        monkeypatch.setitem(sys.modules, "helpers_of_test", _module(tmp_path / "helpers_of_test.py", HELPERS.replace(old, new)))
        module = _module(tmp_path / "mine.py", FILE.replace(old, new))
        monkeypatch.setitem(sys.modules, "mine", module)
        monkeypatch.setitem(PAIRWISE, "maximum", Relation(lambda R, K: R, module.maximum))
        return _trial("maximum").key

    return of


def _module(path: Path, text: str) -> ModuleType:
    path.write_text(dedent(text))
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    linecache.checkcache()
    exec(compile(path.read_text(), path, "exec"), module.__dict__)
    return module


def _trial(relation: str = "subtraction") -> Trial:
    return expand(GRIDS_DIR / "relation.yaml", "model.name=san10_pairwise", f"model.relation={relation}")["pairwise_summation"]


CHANGES = {
    "the function": ("torch.maximum", "torch.minimum"),
    "what it calls": ("ops.unfold(psi, footprint)", "ops.unfold(-psi, footprint)"),
    "a constant": ("SCALE = 1.0", "SCALE = 2.0"),
    "a set in a dict": ('"three"', '"four"'),
    "a function in a dict": ("x + 1", "x + 2"),
    "a tensor": ("arange(3.0)", "arange(4.0)"),
    "a cached function": ("x - 1", "x - 2"),
    "a callable object": ("self.twice(x) *", "self.twice(x) /"),
    "its base class": ("2 * x", "3 * x"),
    "a partial": ("alpha=3", "alpha=4"),
    "a module's function": ("FACTOR * x", "FACTOR + x"),
    "a module's constant": ("FACTOR = 3", "FACTOR = 4"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_code_is_another_key(change: str, key: Callable[..., str]) -> None:
    assert key() != key(*CHANGES[change])


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
    names: dict[str, object] = {"__name__": "__main__"}
    exec("def typed(phi, psi, footprint): return phi", names)
    monkeypatch.setitem(PAIRWISE, "typed", Relation(lambda R, K: R, names["typed"]))  # type: ignore[arg-type]
    said = error_message(lambda: _trial("typed"))
    assert "cannot read the source of typed" in said
    assert custom_code(model_spec("resnet26")) == {}


def test_a_key_is_the_same_in_every_process() -> None:
    """Sets have another order there, and functions another address."""
    program = "from tests.experiments.grids import test_custom_code as t; print(t.key_here())"
    seeds = [os.environ | {"PYTHONHASHSEED": seed} for seed in "12"]
    runs = [subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True) for env in seeds]
    assert runs[0].stdout == runs[1].stdout != "", runs[0].stderr


def key_here() -> str:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        return key.__wrapped__(Path(folder), patch)()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def relate(phi, psi, footprint):\n    import helpers_of_nobody", "imports a module when it runs"),
        ("import threading\nLOCK = threading.Lock()\ndef relate(phi, psi, footprint): return LOCK", "cannot hash <"),
    ],
    ids=["an import inside", "a lock"],
)
def test_code_that_cannot_be_followed_is_refused(code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAIRWISE, "mine", Relation(lambda R, K: R, _module(tmp_path / "mine.py", code).relate))
    assert said in error_message(lambda: _trial("mine"))
