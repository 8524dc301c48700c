"""`summary.csv` and `confusion.csv`."""

from dataclasses import replace

from experiments.runs.summary import Confusion, best_of, is_out_of_patience, summary_csv
from tests.experiments.samples import EPOCH


def test_summary_lists_the_epochs() -> None:
    assert summary_csv([replace(EPOCH, ended=1_763_760_000_123)]).decode().splitlines() == [
        "epoch,lr,train_loss,images_per_second,wait_share,val_loss,top1,top5,train_top1,ended",
        "0,0.1,1.0,2.0,0.5,1.0,50.0,100.0,25.0,2025-11-21T21:20:00.123+00:00",
    ]


def test_epochs_without_validation_are_not_the_best() -> None:
    course = [None, 30.0, None, 50.0, None, 40.0]
    history = [replace(EPOCH, epoch=number, val_loss=top1, top1=top1, top5=top1) for number, top1 in enumerate(course)]
    assert best_of(history) == history[3] and best_of(history[:1]) is None
    assert history[0].metrics().keys() == EPOCH.metrics().keys() - {"val/loss", "val/top1", "val/top5"}


def test_patience_ends_only_after_a_validation() -> None:
    course = [None, 30.0, None, 20.0, None, 20.0]
    history = [replace(EPOCH, epoch=number, val_loss=top1, top1=top1, top5=top1) for number, top1 in enumerate(course)]
    assert [is_out_of_patience(history[:number], 3) for number in range(1, 7)] == [False] * 5 + [True]


def test_lower_loss_decides_between_epochs_with_the_same_top1() -> None:
    history = [replace(EPOCH, epoch=number, val_loss=loss) for number, loss in enumerate([38.3, 0.6, 0.7])]
    assert best_of(history) == history[1]


def test_confusion_round_trip() -> None:
    one = Confusion(("a cat", 'the "dog"', "none"), ((3, 1, 0), (0, 2, 0), (0, 0, 0)))
    assert Confusion.of_csv(one.as_csv()) == one
    assert one.as_csv().decode().splitlines()[1] == "a cat,3,1,0"
    assert one.accuracies == [75.0, 100.0, None]
    assert (one + one).counts == ((6, 2, 0), (0, 4, 0), (0, 0, 0))
    for broken in (None, b"", b"a note", b"class,a\na,1,2\n", b"class,a,b\na,1,2\n"):
        assert Confusion.of_csv(broken) is None
