"""What is seen of a run: on terminals of any size, in logs, and what the cells tell for it."""

from __future__ import annotations

import fcntl
import io
import itertools
import os
import pty
import re
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.sweep import Outcome
from experiments.training.progress import Progress

NAMES = {"a": "pairwise_3", "b": "resnet26_3", "c": "product-footprint3-relationsubtraction-mappingLRL"}
EPOCHS = {"a": 4, "b": 4, "c": 2}


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


SPEED = {"train/images_per_second": 812.0, "train/wait_share": 0.03}


def inside(epoch: int, step: int, top1: float | None = None) -> dict[str, float]:
    """A report from inside an epoch of 100 steps."""
    known = {} if top1 is None else {"val/top1": top1}
    return {"epoch": epoch, "epochs": 4, "step": step, "steps": 100, "train/loss": 1.5} | SPEED | known


def whole(epoch: int) -> dict[str, float]:
    """A report of an epoch's end."""
    return {"epoch": epoch, "epochs": 4, "train/loss": 1.25, "val/top1": 50.0 + epoch} | SPEED


class Terminal:
    """A terminal of the kernel's, and what a person sees there: text, newlines, and the codes that `Screen` uses."""

    def __init__(self, columns: int, rows: int) -> None:
        self.reader, writer = pty.openpty()
        os.set_blocking(self.reader, False)
        self.out = open(writer, "w", encoding="utf-8")
        self.columns, self.rows = columns, rows
        self.lines, self.row, self.column = [""], 0, 0
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int) -> None:
        """As most terminals do it, with lines that have become too long broken."""
        lines = self.seen
        fcntl.ioctl(self.reader, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.columns, self.rows = columns, rows
        self.lines = [line[at : at + columns] for line in lines for at in range(0, max(len(line), 1), columns)]
        self.row = len(self.lines) - 1

    @property
    def seen(self) -> list[str]:
        written = b""
        while True:
            try:
                written += os.read(self.reader, 65536)
            except BlockingIOError:
                break
        for piece in re.findall(r"\x1b\[\d*[A-Z]|[^\x1b]", written.decode()):
            self._show(piece)
        return self.lines

    def _show(self, piece: str) -> None:
        if up := re.fullmatch(r"\x1b\[(\d+)A", piece):
            self.row -= int(up[1])
            assert max(len(self.lines) - self.rows, 0) <= self.row, "there is no way to above the top"
        elif piece == "\x1b[J":
            assert self.column == 0
            self.lines[self.row :] = [""]
        elif piece == "\r":
            self.column = 0
        elif piece == "\n":
            self.row, self.column = self.row + 1, 0
            self.lines += [""] * (self.row - len(self.lines) + 1)
        else:
            assert piece.isprintable(), repr(piece)
            if self.column == self.columns:
                self._show("\n")
                self.column = 0
            assert self.column == len(self.lines[self.row]), "written over something"
            self.lines[self.row] += piece
            self.column += 1


@contextmanager
def terminal(columns: int, rows: int) -> Iterator[Terminal]:
    place = Terminal(columns, rows)
    try:
        yield place
    finally:
        place.out.close()
        os.close(place.reader)


@pytest.fixture(autouse=True)
def capable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def without_times(lines: list[str]) -> list[str]:
    return [re.sub(r"^\[[^]]*\] ", "", line) for line in lines]


def test_a_terminal_shows_a_bar_and_a_line_for_each_cell() -> None:
    clock, said = Clock(), "loss 1.250, 812 images/s, waiting 3 %"
    with terminal(130, 30) as place:
        progress = Progress(NAMES, EPOCHS, place.out, clock)
        for key in "ab":
            progress.started(key)
        assert place.seen == [
            "[   0 s, 0/3 done] pairwise_3 starts",
            "[   0 s, 0/3 done] resnet26_3 starts",
            "0/3 cells  [------------------------------]  0/10 epochs",
            "pairwise_3  starts",
            "resnet26_3  starts",
            "",
        ]
        clock.now += 10
        progress.progress("a", inside(0, 10))
        progress.progress("b", inside(2, 40, top1=61.5))  # goes on from a checkpoint
        clock.now += 10
        progress.progress("a", inside(0, 60))
        progress.progress("b", inside(2, 100, top1=61.5))
        # Here 1.1 epochs in 20 s; left are 3.4 of a, 1 of b, 2 of c.
        assert place.seen[2:] == [
            "0/3 cells  [##########--------------------]  3/10 epochs, 2 min left",
            "pairwise_3  epoch 1/4, step 60/100, 68 s left, loss 1.500, 812 images/s, waiting 3 %",
            "resnet26_3  epoch 3/4, validating, 17 s left, top-1 61.5 %, loss 1.500, 812 images/s, waiting 3 %",
            "",
        ]
        clock.now += 10
        progress.progress("b", whole(4))
        progress.finished(Outcome("b"))
        progress.started("c")
        assert place.seen[2:] == [
            f"[  30 s, 1/3 done, 77 s left] resnet26_3 finished in 30 s: epoch 4/4, top-1 54.0 %, {said}",
            f"[  30 s, 1/3 done, 77 s left] {NAMES['c']} starts",
            "1/3 cells  [#############-----------------]  4/10 epochs, 77 s left",
            f"{'pairwise_3':43s}  epoch 1/4, step 60/100, 58 s left, loss 1.500, 812 images/s, waiting 3 %",
            f"{NAMES['c'][:41]}..  starts",
            "",
        ]
        progress.finished(Outcome("a", "ValueError: no"))
        assert place.seen[-3:-1] == [
            "2/3 cells (1 FAILED)  [#############-----------------]  4/10 epochs, 29 s left",
            f"{NAMES['c'][:41]}..  starts",
        ]
        progress.close()
        assert without_times(place.seen)[-3:] == [
            "product-footprint3-relationsubtraction-mappingLRL starts",
            "pairwise_3 FAILED after 30 s: ValueError: no",
            "",
        ]


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (90, "resnet26_3  epoch 3/4, step 50/100, 20 s left, top-1 61.5 %, loss 1.500, 812 images/s"),
        (60, "resnet26_3  epoch 3/4, step 50/100, 20 s left, top-1 61.5 %"),
        (40, "resnet26_3  epoch 3/4, step 50/100, 2.."),
        (12, "r..  epoc.."),
    ],
)
def test_a_narrow_terminal_shows_what_matters_most(columns: int, line: str) -> None:
    clock = Clock()
    with terminal(columns, 30) as place:
        progress = Progress(NAMES, EPOCHS, place.out, clock)
        progress.started("b")
        for step in (25, 50):
            clock.now += 3.33333
            progress.progress("b", inside(2, step, top1=61.5))
        assert place.seen[-2:] == [line, ""]


def test_a_low_terminal_shows_as_many_cells_as_it_has_rows() -> None:
    keys = [f"cell{number}" for number in range(9)]
    with terminal(80, 7) as place:
        progress = Progress({key: key for key in keys}, dict.fromkeys(keys, 4), place.out, Clock())
        for key in keys:
            progress.started(key)
        assert [line.split()[0] for line in place.seen[-7:-1]] == ["0/9", *keys[:4], "and"]
        assert place.seen[-2] == "and 5 more"


EVENTS = st.tuples(st.sampled_from("abc"), st.sampled_from(["start", "step", "epoch", "end", "fail"]), st.integers(20, 130))


@settings(max_examples=50)
@given(st.lists(EVENTS, max_size=15))
def test_nothing_is_left_behind(events: list[tuple[str, str, int]]) -> None:
    """Whatever happens in terminals of whatever width: one bar while it runs, and at the end what was said alone."""
    clock, said = Clock(), 0
    with terminal(80, 1000) as place:
        progress = Progress(NAMES, EPOCHS, place.out, clock)
        for key, event, columns in events:
            place.resize(columns, 1000)
            clock.now += 7
            if event == "step":
                progress.progress(key, inside(1, 30))
            elif event == "epoch":
                progress.progress(key, whole(2))
            else:
                said += 1
                if event == "start":
                    progress.started(key)
                else:
                    progress.finished(Outcome(key, "it failed" if event == "fail" else None))
            assert sum(bool(re.match(r"\d+/3 cells", line)) for line in place.seen) == 1
        progress.close()
        assert len(re.findall(r"\[ *\d+ s, ", "".join(place.seen))) == said
        assert not re.search(r"cells|left:|\.\.", "".join(place.seen))


def test_a_log_has_lines_often_at_first_and_then_once_a_minute() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(NAMES, EPOCHS, out, clock)
    clock.now += 5
    progress.started("a")
    for step in range(1, 98):
        clock.now += 10
        progress.progress("a", inside(0, step))
    clock.now += 20
    progress.progress("a", whole(1))  # an epoch's end need not wait for its minute
    clock.now += 9
    progress.progress("a", whole(2))
    progress.close()
    lines = out.getvalue().splitlines()
    said = "loss 1.500, 812 images/s, waiting 3 %"
    assert lines[:3] == [
        "[   5 s, 0/3 done] pairwise_3 starts",
        f"[  15 s, 0/3 done] pairwise_3 epoch 1/4, step 1/100, {said}",
        # 0.01 epochs in 10 s, and 25 s since the beginning
        f"[  25 s, 0/3 done, 6 h 56 min left] pairwise_3 epoch 1/4, step 2/100, 66 min left, {said}",
    ]
    *at, end = (int(line[1:5]) for line in lines)
    pauses = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (10, 60)
    assert end - at[-1] == 40
    assert lines[-1].endswith("pairwise_3 epoch 1/4, 49 min left, top-1 51.0 %, loss 1.250, 812 images/s, waiting 3 %")
    assert len(lines) < 40
    assert "\x1b" not in out.getvalue()


def test_a_terminal_without_codes_is_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with terminal(80, 24) as place:
        progress = Progress(NAMES, EPOCHS, place.out)
        progress.started("a")
        progress.close()
        assert without_times(place.seen) == ["pairwise_3 starts", ""]


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_terminal_that_goes_away_stops_nothing(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    place = Terminal(80, 24)
    progress = Progress(NAMES, EPOCHS, place.out)
    progress.started("a")
    os.close(place.reader)
    with pytest.raises(OSError):
        print("anything", file=place.out, flush=True)
    progress.progress("a", whole(1))
    progress.finished(Outcome("a"))
    progress.close()
    with suppress(OSError):
        place.out.close()


def test_a_cell_that_goes_on_does_not_count_what_was_done_before() -> None:
    clock = Clock()
    progress = Progress({"a": "a"}, {"a": 4}, io.StringIO(), clock)
    progress.started("a")
    assert progress.seconds_left() is None
    progress.progress("a", inside(2, 1))
    assert progress.seconds_left() is None
    clock.now += 10
    progress.progress("a", inside(2, 51))  # half an epoch in 10 s, 1.49 are left
    assert progress.seconds_left() == pytest.approx(29.8)
    clock.now += 10
    progress.started("a")  # after a failure, from a checkpoint
    progress.progress("a", inside(2, 26))
    assert progress.seconds_left() == pytest.approx(1.74 / 0.25 * 20)
    progress.finished(Outcome("a"))
    assert progress.seconds_left() is None


def test_the_last_validation_has_no_time_left() -> None:
    clock, out = Clock(), io.StringIO()
    progress = Progress({"a": "a"}, {"a": 4}, out, clock)
    progress.started("a")
    for step in (1, 100):
        clock.now += 10
        progress.progress("a", inside(3, step))
    last = out.getvalue().splitlines()[-1]
    assert last == "[  20 s, 0/1 done] a epoch 4/4, validating, loss 1.500, 812 images/s, waiting 3 %"


def test_a_cell_that_was_complete_says_nothing_of_speed() -> None:
    clock, out = Clock(), io.StringIO()
    progress = Progress(NAMES, EPOCHS, out, clock)
    progress.started("a")
    clock.now += 10
    progress.finished(Outcome("a"))
    assert progress.seconds_left() is None
    assert "pairwise_3 finished in 10 s: already complete" in out.getvalue()
