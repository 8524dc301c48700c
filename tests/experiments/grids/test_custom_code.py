"""The key of a cell depends on the code of relations that a user has added."""

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
    """The key of a trial with a relation from a user's file, after a change in that file or in a module that it imports."""
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
    "function": ("torch.maximum", "torch.minimum"),
    "called function": ("ops.unfold(psi, footprint)", "ops.unfold(-psi, footprint)"),
    "constant": ("SCALE = 1.0", "SCALE = 2.0"),
    "set in a dict": ('"three"', '"four"'),
    "function in a dict": ("x + 1", "x + 2"),
    "tensor": ("arange(3.0)", "arange(4.0)"),
    "cached function": ("x - 1", "x - 2"),
    "callable object": ("self.twice(x) *", "self.twice(x) /"),
    "base class": ("2 * x", "3 * x"),
    "partial": ("alpha=3", "alpha=4"),
    "function of a module": ("FACTOR * x", "FACTOR + x"),
    "constant of a module": ("FACTOR = 3", "FACTOR = 4"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_code_changes_the_key(change: str, key: Callable[..., str]) -> None:
    assert key() != key(*CHANGES[change])


def test_registered_function_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
        import san

        @san.register_relation("doubled", channels=lambda R, K: R)
        def doubled(phi, psi, footprint):
            return 2 * san.ops.subtraction(phi, psi, footprint)
    """
    monkeypatch.setitem(PAIRWISE, "doubled", Relation(lambda R, K: R, lambda phi, psi, footprint: phi))

    def key(source: str) -> str:
        monkeypatch.setitem(sys.modules, "mine", module := _module(tmp_path / "mine.py", source))
        assert PAIRWISE["doubled"].delta is module.doubled
        return _trial("doubled").key

    first = key(text)
    assert key(text.replace("2 *", "3 *")) != first
    assert key(text) == first  # its finished cells are found again


def test_unused_code_does_not_change_the_key(key: Callable[..., str]) -> None:
    assert key() == key("return 1", "return 2")


def test_operators_of_the_paper_need_no_source() -> None:
    for field, registries in REGISTRIES.items():
        assert OURS[field] <= {name for registry in registries for name in registry}
    specs = [trial.config.model.spec() for path in GRIDS_DIR.glob("*.yaml") for trial in expand(path).values()]
    assert [custom_code(spec) for spec in specs] == [{}] * len(specs)


def test_replaced_operator_of_the_paper_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _trial().key
    monkeypatch.setitem(MAPPINGS, "LRL", Mapping(lambda hidden: (hidden // 2,), lambda R, G: (G,)))
    assert _trial().key != plain


def test_rejects_code_without_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    exec("def typed(phi, psi, footprint): return phi", names)
    monkeypatch.setitem(PAIRWISE, "typed", Relation(lambda R, K: R, names["typed"]))  # type: ignore[arg-type]
    said = error_message(lambda: _trial("typed"))
    assert "cannot read the source of typed" in said
    assert custom_code(model_spec("resnet26")) == {}


def test_key_is_the_same_in_every_process() -> None:
    """Sets have another order in another process, and functions another address."""
    program = "from tests.experiments.grids import test_custom_code as t; print(t.key_here())"
    seeds = [os.environ | {"PYTHONHASHSEED": seed} for seed in "12"]
    runs = [subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True) for env in seeds]
    assert runs[0].stdout == runs[1].stdout != "", runs[0].stderr


def key_here() -> str:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        return key.__wrapped__(Path(folder), patch)()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def relate(phi, psi, footprint):\n    import helpers_of_nobody", "imports a module when it runs"),
        ("import threading\nLOCK = threading.Lock()\ndef relate(phi, psi, footprint): return LOCK", "cannot hash <"),
    ],
    ids=["an import inside", "a lock"],
)
def test_rejects_code_that_cannot_be_hashed(code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAIRWISE, "mine", Relation(lambda R, K: R, _module(tmp_path / "mine.py", code).relate))
    assert message in error_message(lambda: _trial("mine"))
