"""`summary.csv`."""

from __future__ import annotations

from experiments.runs.summary import read_ended, read_top1, summary_csv
from tests.experiments.samples import EPOCH


def test_summary_round_trip() -> None:
    assert read_ended(None) == read_ended(summary_csv([], {})) == {}
    content = summary_csv([EPOCH], {0: 1_763_760_000_123})
    assert read_ended(content) == {0: 1_763_760_000_123}
    assert read_top1(content) == [50.0]
    assert content.decode().splitlines() == [
        "epoch,lr,train_loss,images_per_second,wait_share,val_loss,top1,top5,ended",
        "0,0.1,1.0,2.0,0.5,1.0,50.0,100.0,2025-11-21T21:20:00.123+00:00",
    ]
    assert read_ended(b"a note") == {}
    assert read_top1(b"a note") == []
