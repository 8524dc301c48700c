"""Progress of a sweep and of a count, on terminals and in logs."""

import io
import itertools
import os
import pty
import re
from collections.abc import Iterator
from contextlib import suppress

import pytest

from cluster import Outcome
from experiments.runner import progress as progress_module
from experiments.runner.progress import Progress, counting, duration
from tests.experiments.samples import Clock

NAMES = {"a": "pairwise_3", "b": "resnet26_3"}
EPOCHS = {"a": 4, "b": 4}
SPEED = {"train/images_per_second": 812.0, "train/wait_share": 0.03}
SAID = "loss 1.500, 812 images/s, waiting 3 %"


def inside(epoch: int, step: int) -> dict[str, float]:
    """A report from inside an epoch of 100 steps."""
    return {"epoch": epoch, "epochs": 4, "step": step, "steps": 100, "train/loss": 1.5} | SPEED


def whole(epoch: int) -> dict[str, float]:
    """A report from the end of an epoch."""
    return {"epoch": epoch, "epochs": 4, "train/loss": 1.25, "val/top1": 50.0 + epoch} | SPEED


class Terminal:
    """A pseudo-terminal that knows the control codes of rich."""

    def __init__(self) -> None:
        self.reader, writer = pty.openpty()
        os.set_blocking(self.reader, False)
        self.out = open(writer, "w", encoding="utf-8")
        self.lines, self.row = [""], 0

    def seen(self) -> list[str]:
        """The lines on the screen, without empty ones."""
        written = b""
        with suppress(BlockingIOError):
            while part := os.read(self.reader, 65536):
                written += part
        for code in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[^\x1b]", written.decode()):
            if up := re.fullmatch(r"\x1b\[(\d+)A", code):
                self.row -= int(up[1])
                assert self.row >= 0
            elif code == "\x1b[2K":
                self.lines[self.row] = ""
            elif code == "\n":
                self.row += 1
                self.lines += [""] * (self.row - len(self.lines) + 1)
            elif code.isprintable():
                self.lines[self.row] += code
        return [line.rstrip() for line in self.lines if line]


@pytest.fixture
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    columns = getattr(request, "param", 130)
    for name, value in {"TERM": "xterm", "COLUMNS": str(columns), "LINES": "30"}.items():
        monkeypatch.setenv(name, value)
    found = Terminal()
    yield found
    with suppress(OSError):
        found.out.close()
    with suppress(OSError):
        os.close(found.reader)


def test_terminal_shows_a_bar_and_a_row_per_running_trial(terminal: Terminal) -> None:
    clock = Clock()
    progress = Progress(NAMES, EPOCHS, terminal.out, clock)
    progress.started("a")
    progress.started("b")
    for step in (1, 51):
        clock.now += 10
        progress.progress("a", inside(0, step))
    assert terminal.seen()[:2] == ["[   0 s, 0/2 done] pairwise_3 starts", "[   0 s, 0/2 done] resnet26_3 starts"]
    bar, *rows = terminal.seen()[2:]
    assert re.fullmatch("0/2 trials  [━╸╺]{20}  0/8 epochs, 80 s left", bar)
    assert rows == [f"pairwise_3  epoch 1/4, step 51/100, 70 s left, {SAID}", "resnet26_3  starts"]
    progress.finished(Outcome("b", "ValueError: no"))
    assert terminal.seen()[2] == "[  20 s, 1/2 done, 70 s left] resnet26_3 FAILED after 20 s: ValueError: no"
    assert terminal.seen()[3].startswith("1/2 trials (1 FAILED)")
    progress.close()
    assert len(terminal.seen()) == 3  # the bar is gone, the messages stay


@pytest.mark.parametrize("terminal", [60], indirect=True)
def test_rows_are_cut_to_the_width_of_the_terminal(terminal: Terminal) -> None:
    progress = Progress(NAMES, EPOCHS, terminal.out, Clock())
    progress.started("a")
    progress.progress("a", inside(0, 60))
    row = terminal.seen()[-1]
    assert row.startswith("pairwise_3  epoch 1/4, step 60/100") and len(row) <= 60
    progress.close()


@pytest.mark.parametrize(("terminal", "term"), [(130, "dumb"), (20, "xterm")], indirect=["terminal"], ids=["dumb", "narrow"])
def test_terminal_without_room_or_control_codes_gets_plain_lines(
    terminal: Terminal, term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    progress = Progress(NAMES, EPOCHS, terminal.out, Clock())
    progress.started("a")
    assert terminal.seen() == ["[   0 s, 0/2 done] pairwise_3 starts"]


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_lost_terminal_does_not_stop_training(term: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    progress = Progress(NAMES, EPOCHS, terminal.out)
    progress.started("a")
    os.close(terminal.reader)
    with pytest.raises(OSError):
        print("anything", file=terminal.out, flush=True)
    progress.progress("a", whole(1))
    progress.finished(Outcome("a"))
    progress.close()


def test_log_has_fewer_lines_as_a_trial_goes_on() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(NAMES, EPOCHS, out, clock)
    clock.now += 5
    progress.started("a")
    for step in range(1, 98):
        clock.now += 10
        progress.progress("a", inside(0, step))
    clock.now += 20
    progress.progress("a", whole(1))  # the end of an epoch is shown before a minute has passed
    clock.now += 9
    progress.progress("a", whole(2))
    progress.close()
    lines = out.getvalue().splitlines()
    assert lines[:3] == [
        "[   5 s, 0/2 done] pairwise_3 starts",
        f"[  15 s, 0/2 done] pairwise_3 epoch 1/4, step 1/100, {SAID}",
        # 0.01 epochs in 10 s; the other trial is not running yet
        f"[  25 s, 0/2 done, 2 h 13 min left] pairwise_3 epoch 1/4, step 2/100, 66 min left, {SAID}",
    ]
    *at, end = (int(line[1:5]) for line in lines)
    pauses = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert pauses == sorted(pauses) and (pauses[0], pauses[-1], end - at[-1]) == (10, 60, 40)
    assert lines[-1].endswith("pairwise_3 epoch 1/4, 49 min left, top-1 51.0 %, loss 1.250, 812 images/s, waiting 3 %")
    assert "\x1b" not in out.getvalue()


def test_time_left_does_not_count_epochs_before_a_resume() -> None:
    clock = Clock()
    progress = Progress({"a": "a"}, {"a": 4}, io.StringIO(), clock)
    progress.started("a")
    progress.progress("a", inside(2, 1))
    assert progress.seconds_left() is None
    clock.now += 10
    progress.progress("a", inside(2, 51))  # half an epoch in 10 s, 1.49 are left
    assert progress.seconds_left() == pytest.approx(29.8)
    clock.now += 10
    progress.started("a")  # after a failure, from a checkpoint
    progress.progress("a", inside(2, 26))
    assert progress.seconds_left() is None  # the new attempt may be slower
    progress.finished(Outcome("a"))
    assert progress.seconds_left() is None


def test_last_validation_shows_no_time_left() -> None:
    clock, out = Clock(), io.StringIO()
    progress = Progress({"a": "a"}, {"a": 4}, out, clock)
    progress.started("a")
    for step in (1, 100):
        clock.now += 10
        progress.progress("a", inside(3, step))
    assert out.getvalue().splitlines()[-1] == f"[  20 s, 0/1 done] a epoch 4/4, validating, {SAID}"


@pytest.mark.parametrize(("what", "prefix"), [("", ""), ("net cw90", "net cw90: ")])
def test_log_of_a_count(what: str, prefix: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with counting(what, 3, "batches") as count:
        count()
    assert capsys.readouterr().err == ""  # too early
    monkeypatch.setattr(progress_module, "SECONDS_BETWEEN_LINES", 0.0)
    with counting(what, 3, "batches") as count:
        count(2, ", 1 broken")
    assert capsys.readouterr().err == f"[   0 s] {prefix}2 of 3 batches, 1 broken\n"


def test_bar_of_a_count(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", terminal.out)
    monkeypatch.setattr(progress_module, "SECONDS_BETWEEN_DRAWINGS", 0.0)
    with counting("train", 4, "images") as count:
        count(2)
        (line,) = terminal.seen()
        assert line.startswith("train") and "2 of 4 images, " in line
    assert terminal.seen() == []


def test_first_estimate_does_not_count_the_start() -> None:
    """Loading packages and the first step take longer than the steps after them."""
    clock = Clock()
    progress = Progress({"a": "a", "b": "b", "c": "c"}, dict.fromkeys("abc", 4), io.StringIO(), clock)
    clock.now += 60
    for key in "ab":
        progress.started(key)
    clock.now += 20
    for key in "ab":
        progress.progress(key, inside(0, 1))
    clock.now += 10
    for key in "ab":
        progress.progress(key, inside(0, 51))  # 20 s per epoch
    # Two trials with 3.49 epochs left and one with 4, two at a time.
    assert progress.seconds_left() == pytest.approx((2 * 3.49 + 4) * 20 / 2)


def test_seconds_count_from_the_start_of_the_command_and_resuming_is_reported() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(NAMES, EPOCHS, out, clock, start=clock.now - 12)
    for key in NAMES:
        progress.started(key)
    progress.progress("a", inside(2, 1))
    progress.finished(Outcome("b"))
    assert out.getvalue().splitlines() == [
        "[  12 s, 0/2 done] pairwise_3 starts",
        "[  12 s, 0/2 done] resnet26_3 starts",
        "[  12 s, 0/2 done] pairwise_3 resumes after epoch 2",
        "[  12 s, 1/2 done] resnet26_3 finished in 0 s: already complete",
    ]


def test_interrupted_trial_says_where_it_has_saved_and_where_it_resumes() -> None:
    out = io.StringIO()
    progress = Progress(NAMES, EPOCHS, out, Clock())
    progress.started("a")
    progress.interrupted()
    progress.progress("a", {**inside(1, 20), "interrupted": 1})
    progress.finished(Outcome("a"))
    again = Progress(NAMES, EPOCHS, out, Clock())
    again.started("a")
    again.progress("a", inside(1, 21))
    lines = [line.partition("] ")[2] for line in out.getvalue().splitlines()]
    assert lines == [
        "pairwise_3 starts",
        "interrupted; asking the trials to save their work. Press Ctrl-C again to end at once",
        "pairwise_3 saved at epoch 2/4, step 20/100",
        "pairwise_3 starts",
        "pairwise_3 resumes at epoch 2/4, step 21/100",
    ]


def test_durations_have_two_units() -> None:
    wanted = {0: "0 s", 59.6: "1 min 0 s", 160: "2 min 40 s", 3600: "1 h 0 min", 12_059: "3 h 20 min", 360_000: "4 days"}
    assert {seconds: duration(seconds) for seconds in wanted} == wanted
