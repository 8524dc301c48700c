"""Sends a trial's metrics to MLflow without letting the training wait."""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections.abc import Mapping, Sequence, Set

from experiments.config.grid import Trial
from experiments.runs.store import PAUSE
from experiments.runs.summary import Epoch
from experiments.tracking.client import usable
from experiments.tracking.registry import TrainedModel, register
from experiments.tracking.tracker import NodeMonitor, Tracker, TrialRun
from experiments.training.checkpoint import Checkpoint
from san import Complexity

_log = logging.getLogger(__name__)

LONGEST_PAUSE = 15
"""Times `PAUSE`: half a minute, so that the end of a trial, which waits two minutes, includes a few more attempts."""


class AsyncMetricLogger:
    """Sends a trial's metrics to its MLflow run from a thread.

    The checkpoint holds the metrics of all epochs, so nothing else has to be stored. At the start, at the end and after a
    failed request, the thread asks MLflow which epochs it has, and sends the others. MLflow stores a value only once per step
    and timestamp, so a request whose answer was lost can be repeated.

    Args:
        tracking_uri: MLflow's address.
        trial: the trial.
        complexity, tags: parameters, FLOPs and tags of the run.
        images: number of images in a training epoch.
        resumed: whether the trial resumes from a checkpoint, whose run may belong to another grid.
    """

    def __init__(
        self,
        tracking_uri: str,
        trial: Trial,
        complexity: Complexity,
        tags: Mapping[str, str],
        images: int,
        resumed: bool,
    ) -> None:
        self.tracking_uri, self.trial, self.complexity, self.tags = tracking_uri, trial, complexity, tags
        self.images, self.resumed = images, resumed
        self._run: TrialRun | None = None
        self._logged: Set[int] | None = None  # epochs that MLflow has; None: ask
        self._monitor: NodeMonitor | None = None
        self._history: tuple[Epoch, ...] = ()
        self._best: Checkpoint | None = None
        self._stopped_by: str | None = None
        self._requests: queue.SimpleQueue[bool | None] = queue.SimpleQueue()  # whether the trial has ended; None: close
        self._gave_up = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._work, name="metric-logger", daemon=True)
        self._thread.start()

    def log(self, history: Sequence[Epoch]) -> None:
        """Sends the epochs that MLflow does not have."""
        self._history = tuple(history)
        self._requests.put(False)

    def finish(self, best: Checkpoint | None, stopped_by: str | None, seconds: float) -> None:
        """Registers the best weights and ends the run. What MLflow does not accept within `seconds`, the next start of the
        trial sends.

        `stopped_by` names the grid whose early stopping ends the trial.
        """
        self._best, self._stopped_by = best, stopped_by
        self._requests.put(True)
        self.close(seconds)

    def close(self, seconds: float = 10.0) -> None:
        """Sends the remaining metrics, for up to `seconds`."""
        self._requests.put(None)
        self._thread.join(seconds)
        self._gave_up.set()

    def _work(self) -> None:
        try:
            for at_end in iter(self._requests.get, None):
                pause = PAUSE
                while not self._send(at_end):
                    # Random and growing pauses, so that the trials do not keep a slow server busy.
                    if self._gave_up.wait(pause * random.uniform(0.5, 1)):
                        return
                    pause = min(2 * pause, LONGEST_PAUSE * PAUSE)
        finally:
            if self._monitor is not None:
                self._monitor.finish()  # type: ignore[no-untyped-call]

    def _send(self, at_end: bool) -> bool:
        """Returns whether MLflow accepted everything."""
        try:
            run = self._run = self._run or self._open()
            with usable(run.uri):
                logged, self._logged = None if at_end else self._logged, None
                self._logged = run.log(self._history, logged)
                if at_end:
                    self._end(run)
                elif NodeMonitor.is_wanted() and (self._monitor is None or not self._monitor.is_alive):
                    self._monitor = NodeMonitor(run.uri, run.run_id)
        except Exception as error:  # whatever it is, training goes on
            if not self._warned:
                _log.warning("cannot send results to MLflow, will retry: %s", str(error).partition("\n")[0][:400])
            self._warned = True
            return False
        self._warned = False
        return True

    def _open(self) -> TrialRun:
        run = Tracker(self.tracking_uri, self.trial.grid, self.trial.profile).open(self.trial, self.resumed)
        with usable(run.uri):
            run.describe(self.trial, self.complexity)
            run.tag(self.tags)
        return run

    def _end(self, run: TrialRun) -> None:
        if self._stopped_by is not None:
            return run.stop(self._stopped_by, len(self._history))
        run.summarise(self._history, self.images)
        if self._best is not None:
            best = TrainedModel(self.trial, self._best.history[-1], self._best.origin.classes, self._best.model())
            register(run.client, run.run_id, best)
        run.finish()
