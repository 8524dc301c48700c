"""What lies between a trial that trains and a tracking server that may be away."""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path

from experiments.grids.grid import Trial
from experiments.runs.address import PATIENCE, PAUSE
from experiments.runs.summary import Epoch, read_ended, read_run_id, write_run_id, write_summary
from experiments.tracking import TrackerError
from experiments.tracking.registry import register
from experiments.tracking.store import UNUSABLE
from experiments.tracking.tracker import NodeMonitor, Tracker, TrialRun
from experiments.training.checkpoint import Checkpoint
from san import CheckpointError, Complexity

_log = logging.getLogger(__name__)

LONGEST_PAUSE = 15
"""Times `PAUSE`: half a minute, so that the end of a trial, which waits two, asks some times more."""


class Sender:
    """Brings a trial's records to its run, in order, from a thread of its own: training never waits for the tracker.

    The checkpoint has every epoch, so nothing else has to be kept: at the start, at the end, and after every request that was
    not answered, the tracker is asked which epochs it has, and is sent all others at once. An epoch is sent with the moment at
    which it ended, which `summary.csv` keeps; MLflow takes a value with the same step and moment once only, so a request whose
    answer was lost may be sent again.

    Args:
        tracker: opens the tracker; called in the thread.
        trial, complexity, how: what the run tells of itself; `how` are its tags besides, of device and kernels.
        images: how many an epoch trains on.
        summary: the trial's `summary.csv`, written before anything is sent; `run_id` beside it names the run.
    """

    def __init__(
        self,
        tracker: Callable[[], Tracker],
        trial: Trial,
        complexity: Complexity,
        how: Mapping[str, str],
        images: int,
        summary: Path,
    ) -> None:
        self.tracker, self.trial, self.complexity, self.how = tracker, trial, complexity, how
        self.images, self.summary = images, summary
        self._run: TrialRun | None = None
        self._logged: Set[int] | None = None  # epochs that the run has; None where that has to be asked
        self._monitor: NodeMonitor | None = None
        self._ended = read_ended(summary)
        self._history: tuple[Epoch, ...] = ()
        self._best: Checkpoint | None = None
        self._stopped_by: str | None = None
        self._wanted: queue.SimpleQueue[bool | None] = queue.SimpleQueue()  # whether the trial is complete; None: that is all
        self._given_up = threading.Event()
        self._complete = False
        self._refused = False
        self._thread = threading.Thread(target=self._work, name="sender", daemon=True)
        self._thread.start()

    def log(self, history: Sequence[Epoch]) -> None:
        """Writes the summary, and has sent what the run lacks of the epochs that the checkpoint holds."""
        now = int(time.time() * 1000)
        self._ended = {epoch.epoch: self._ended.get(epoch.epoch, now) for epoch in history}
        self._history = tuple(history)
        write_summary(self.summary, history, self._ended)
        self._wanted.put(False)

    def finish(self, best: Checkpoint | None, seconds: float = PATIENCE) -> bool:
        """Registers the best weights, and ends the run; tries for so long and tells whether all was sent. If not, the trial's
        next start does it."""
        self._best = best
        self._wanted.put(True)
        self.close(seconds)
        return self._complete

    def stop(self, by: str, seconds: float = PATIENCE) -> bool:
        """Ends the run early, as `finish` ends one that is complete; `by` is who stops it."""
        self._stopped_by = by
        return self.finish(None, seconds)

    def close(self, seconds: float = 10.0) -> None:
        """Sends what is waiting, for so long at most, and no more; nothing where `finish` came before."""
        self._wanted.put(None)
        self._thread.join(seconds)
        self._given_up.set()

    def _work(self) -> None:
        try:
            for complete in iter(self._wanted.get, None):
                pause = PAUSE
                while not self._sent(complete):
                    # Longer each time, each trial in its own rhythm: a server that is slow because many ask gets its breath.
                    if self._given_up.wait(pause * random.uniform(0.5, 1)):
                        return
                    pause = min(2 * pause, LONGEST_PAUSE * PAUSE)
                self._complete = complete
        finally:
            if self._monitor is not None:
                self._monitor.finish()  # type: ignore[no-untyped-call]

    def _sent(self, complete: bool) -> bool:
        try:
            if self._run is None:
                run = self.tracker().open(self.trial, read_run_id(self.summary.parent))
                write_run_id(self.summary.parent, run.run_id)
                run.describe(self.trial, self.complexity)
                run.tag(self.how)
                self._run = run
            logged, self._logged = None if complete else self._logged, None  # the last time it is asked anyway
            self._logged = self._run.log(self._history, self._ended, logged)
            if complete and self._stopped_by is not None:
                self._run.stop(self._stopped_by, len(self._history))
            elif complete:
                self._run.summarise(self._history, self.images, self._ended[self._history[-1].epoch])
                if self._best is not None:
                    register(self._run.client, self._run.run_id, self._best)
                self._run.finish()
            elif NodeMonitor.is_wanted() and (self._monitor is None or not self._monitor.is_alive):
                self._monitor = NodeMonitor(self._run.uri, self._run.run_id)
        except (TrackerError, CheckpointError, *UNUSABLE) as error:
            if not self._refused:  # once, for it is asked again and again
                _log.warning("cannot send results to MLflow, will retry: %s", str(error).partition("\n")[0][:400])
            self._refused = True
            return False
        self._refused = False
        return True
