"""Trains one trial: `run_trial` prepares a worker, and `Trainer` builds the model and trains it. Runs with or without Ray."""

from __future__ import annotations

import gc
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

import san
from cluster import ReportFn
from experiments.config.config import TrialConfig
from experiments.config.grid import Trial
from experiments.config.imports import import_sources
from experiments.errors import UserError
from experiments.runs.claims import Claim
from experiments.runs.store import OUTAGE_TIMEOUT, StorageError
from experiments.runs.summary import CONFUSION, SUMMARY, Confusion, Epoch, best_of, is_out_of_patience, summary_csv
from experiments.runs.workspace import Workspace
from experiments.training.augment import Augmentation
from experiments.training.checkpoint import Checkpoint, Checkpoints, Origin, best_in, file_name
from experiments.training.device import compute_tags, explain_oom, prepare_cpu, training_device
from experiments.training.engine import Engine, join_process_group, numerics
from experiments.training.fine_tuning import initialize
from experiments.training.images import loaders
from experiments.training.metrics import RunningEpoch, after_each, evaluate
from experiments.training.recipe import balancing_weights
from experiments.training.reporter import ProgressReporter, Watchdog
from pipelines import Loader

if TYPE_CHECKING:
    from experiments.training.metric_logger import AsyncMetricLogger

_log = logging.getLogger(__name__)

ShouldContinue = Callable[[str, Sequence[float]], bool]
"""Called with a trial's key and the top-1 of its epochs; False ends the trial early."""
SECONDS_BETWEEN_CHECKS = 2.0
"""If steps are slow; also the least time between two questions whether to stop, which are requests to the store."""


@dataclass(frozen=True, slots=True)
class Control:
    """What whoever starts a trial decides about it. The functions are called on the first worker."""

    should_continue: ShouldContinue | None = None
    """Called after each epoch but the last."""
    should_stop: Callable[[], bool] | None = None
    """Called every few seconds; True makes the trial save its work and return."""
    grid_claim: Claim | None = None
    """That of the `san run` that has started the trial."""
    may_stand_still: bool = False
    """At a breakpoint: `checkpointing.hang_timeout_minutes` has no effect."""


def run_trial(workspace: Workspace, trial: Trial, report: ReportFn, control: Control = Control()) -> nn.Module:
    """Trains one trial, or the rest of it. The results are in MLflow, the weights in the checkpoints.

    Every worker of the trial calls this function and returns the same model, the one that was validated. `report` is called on
    all workers after the same steps; `ProgressReporter` documents the values.

    Raises:
        ClaimedError: another process has taken over the trial, or its grid.
        UserError: a checkpoint, the GPU or its memory cannot be used.
        StorageError: the store cannot be used.
        DataError: an image cannot be used.
        FloatingPointError: a loss or a weight is not finite.
    """
    config = trial.config
    import_sources(trial.imports)
    device = training_device(config)
    with explain_oom(config, device):
        join_process_group(device)
    with (
        trial_log(workspace, trial, dist.get_rank()) as log,
        Watchdog(math.inf if control.may_stand_still else config.checkpointing.hang_timeout, log) as watchdog,
        numerics(config.engine, device),
        explain_oom(config, device),
    ):
        if dist.get_rank() == 0 and control.grid_claim is not None:
            control.grid_claim.check()
        return Trainer(workspace, trial, report, control, watchdog, device).fit()


class _Step(NamedTuple):
    lr: float
    loss_and_accuracy_2: Tensor
    images: int


class _Due(NamedTuple):
    save: bool
    report: bool
    stop: bool
    next_check: int
    """Step of the next check."""


class _Clock:
    """Adds the training time to an epoch, without that for checkpoints and reports."""

    def __init__(self, running: RunningEpoch, loader: Loader) -> None:
        self.running, self.loader, self.waited_before = running, loader, running.waited
        self.start()

    def start(self) -> None:
        self._started = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds since the last start."""
        return time.perf_counter() - self._started

    def stop(self) -> None:
        self.running.seconds += self.elapsed()
        self.running.waited = self.waited_before + self.loader.wait_seconds


class Trainer:
    """The training of one trial, on one of its workers. The arguments are as in `run_trial`."""

    def __init__(
        self, workspace: Workspace, trial: Trial, report: ReportFn, control: Control, watchdog: Watchdog, device: torch.device
    ) -> None:
        self.workspace, self.trial, self.control, self.watchdog = workspace, trial, control, watchdog
        config, rank, world = trial.config, dist.get_rank(), dist.get_world_size()
        store = workspace.store.with_outage_timeout(_outage_timeout(config))
        minutes, keep = config.checkpointing.checkpoint_every_n_minutes, config.checkpointing.keep_checkpoints
        self.checkpoints = Checkpoints(store, workspace.folder(trial), trial.key, keep, 60 * minutes)
        prepare_cpu(config.resources.cpus)
        self.train, self.val = loaders(config, trial.seed, rank, world, device)
        gc.collect()  # an earlier model of this process may still occupy memory, in a cycle of references
        classes = self.train.dataset.classes
        torch.manual_seed(trial.seed)
        model = config.model.spec().build(len(classes))
        torch.manual_seed((trial.seed + rank * 0x9E3779B97F4A7C15) % 2**63)  # each worker augments its images in its own way
        if config.recipe.drop_path:  # a model of the user may have rates of its own
            model.set_drop_rates(drop_path_rate=config.recipe.drop_path)
        if config.recipe.init is not None:
            _log.info(initialize(model, config.recipe.init, trial.init_digest, workspace, classes, config.recipe.freeze))
        self.complexity, self.tags = san.complexity(model, config.data.size), compute_tags(config.engine, device)
        if config.recipe.scaling is not None and rank == 0:
            _log.info(config.recipe.scaling)
        micro_batch = config.recipe.images_at_once(world)
        augment = None if config.recipe.augment == "none" else Augmentation(config.recipe.augment, self.train.transform, device)
        is_balanced = config.recipe.class_weights == "balanced"
        weight_C = balancing_weights(self.train.dataset.labels, len(classes)) if is_balanced else None
        self.engine = Engine(model.to(device), config.recipe, self.train.steps, micro_batch, config.engine, augment, weight_C)
        _log.info(", ".join(f"{name}: {value}" for name, value in self.tags.items()))
        self.reporter = ProgressReporter(report, config.recipe.epochs, self.train)
        self.logger: AsyncMetricLogger | None = None
        """On the first worker."""
        self.history: tuple[Epoch, ...] = ()
        self.last_saved: str | None = None
        """Name of the last checkpoint."""
        self._asked_at = time.monotonic()

    def fit(self) -> nn.Module:
        """Resumes, trains, validates, saves and logs until the last epoch, or until it is asked to stop. Returns the model."""
        try:
            running = self.resume()
            while not self._is_over(self.history) and self._continues(running):
                self.engine.train()
                unchecked: list[_Step] = []
                next_check, clock = running.steps + 1, _Clock(running, self.train)
                for images_NCHW, labels_N in self.train.epoch(running.number, self.train.seen_after(running.steps)):
                    lr = self.engine.lr
                    unchecked.append(_Step(lr, self.engine.train_step(images_NCHW, labels_N), len(labels_N)))
                    running.steps += 1
                    self.watchdog.step_ended()
                    if running.steps >= next_check:
                        due = self.check(unchecked, running, clock)
                        clock.stop()
                        if due.save:
                            self.save(running)
                        if due.stop:
                            self.reporter.report_interrupted(running, self.history)
                            return self.engine.model
                        if due.report:
                            self.reporter.report_step(running, self.history)
                        unchecked.clear()
                        next_check = due.next_check
                        clock.start()
                self.history = (*self.history, self.finish_epoch(running))
                running = RunningEpoch(len(self.history), self.engine.lr)
                # Saved first: after a kill, the next start logs what was saved but not logged.
                self.save(running)
                self.log()
                self.reporter.report_epoch(self.history)
            self.finish()
        except FloatingPointError as error:
            good = self.last_saved and self.checkpoints.uri(self.last_saved)
            raise FloatingPointError(f"{error}; last good checkpoint: {good or 'none'}; try a lower recipe.lr") from None
        finally:
            if self.logger is not None:
                self.logger.close()
        dist.barrier()
        return self.engine.model

    def resume(self) -> RunningEpoch:
        """Loads the last checkpoint, which the first worker chooses, and starts the metric logger."""
        is_first = dist.get_rank() == 0
        saved = self.checkpoints.load() if is_first else None
        chosen = [saved.name if saved else None]
        dist.broadcast_object_list(chosen)
        self.last_saved = chosen[0]
        if saved is None and chosen[0] is not None:
            saved = self.checkpoints.read(chosen[0])
        running = RunningEpoch(0, self.engine.lr)
        if saved is not None:
            self.engine.load_state_dict(saved.engine)
            self.history, running = saved.history, saved.running
        if is_first:
            self._log_resumed(saved)
            self.logger = self._open_logger(resumed=saved is not None)
            self.log()
        return running

    def check(self, steps: Sequence[_Step], running: RunningEpoch, clock: _Clock) -> _Due:
        """Adds losses and hits of the latest steps, over all workers, to the epoch's, and asks the first worker what is due.

        The only place in an epoch where a GPU is waited for and where workers exchange anything but gradients. The sum of the
        losses does not depend on when it is computed, because a resumed epoch computes it after other steps.

        Raises:
            FloatingPointError: a loss is not finite; raised on all workers.
        """
        losses, shares = torch.stack([step.loss_and_accuracy_2 for step in steps]).double().T.tolist()
        finite = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
        is_last = running.steps == self.train.steps
        stop = not is_last and self._is_asked_to_stop()
        save = stop or (self.checkpoints.is_due() and not is_last)
        due = [save, self.reporter.is_due(is_last), stop, self._next_check(running.steps, clock.elapsed() / len(steps))]
        sums = [mean * step.images for means in (losses, shares) for mean, step in zip(means, steps, strict=True)]
        of_worker = torch.tensor([finite, *due, *sums], dtype=torch.float64, device=self.train.device)
        everyone = [torch.empty_like(of_worker) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, of_worker)
        finites, saves, reports, stops, checks, *totals = torch.stack(everyone).T.tolist()
        first = int(min(finites))
        if first < len(steps):
            number = running.steps - len(steps) + first + 1
            raise FloatingPointError(
                f"non-finite loss in step {number} of epoch {running.number} at learning rate {steps[first].lr:.4g}"
            )
        for loss, hits in zip(totals[: len(steps)], totals[len(steps) :], strict=True):
            running.loss += sum(loss)
            running.hits += sum(hits)
        return _Due(bool(saves[0]), bool(reports[0]), bool(stops[0]), int(checks[0]))

    def finish_epoch(self, running: RunningEpoch) -> Epoch:
        """Validates the model if the recipe validates it after this epoch."""
        self.engine.average_buffers()
        recipe, finished, images = self.trial.config.recipe, running.number + 1, len(self.train.dataset)
        if finished % recipe.validate_every_n_epochs and finished != recipe.epochs:
            return running.finished(images, None)
        batches, classes = after_each(self.val.epoch(0), self.watchdog.step_ended), self.train.dataset.classes
        scores = evaluate(self.engine.model, batches, len(classes))
        if not math.isfinite(scores.loss):
            raise FloatingPointError(f"non-finite validation loss after epoch {running.number}")
        epoch = running.finished(images, scores)
        if self._is_over((*self.history, epoch)) and scores.confusion is not None and dist.get_rank() == 0:
            self.checkpoints.write(CONFUSION, Confusion(classes, scores.confusion).as_csv())
        return epoch

    def _is_over(self, history: Sequence[Epoch]) -> bool:
        """Whether the recipe asks for no more epochs."""
        recipe = self.trial.config.recipe
        return len(history) == recipe.epochs or is_out_of_patience(history, recipe.patience)

    def save(self, running: RunningEpoch) -> None:
        state = self.engine.state_dict()
        if not self.engine.is_finite():
            raise FloatingPointError(f"non-finite weights after {running.steps} steps of epoch {running.number}")
        if dist.get_rank() == 0:
            trial, classes = self.trial, self.train.dataset.classes
            origin = Origin(trial.grid, trial.profile, trial.row, trial.seed, trial.record, trial.data_digest, classes)
            self.checkpoints.save(Checkpoint(trial.key, origin, self.history, running, state))
        self.last_saved = file_name(running.number, running.steps)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            with suppress(StorageError):
                self.workspace.store.upload(self.workspace.log(self.trial))

    def log(self) -> None:
        """Writes the finished epochs to a file and sends the epochs to MLflow."""
        if self.logger is not None:
            self.checkpoints.write(SUMMARY, summary_csv(self.history))
            self.logger.log(self.history)

    def finish(self) -> None:
        """Ends the MLflow run, while the other workers wait."""
        stopped = not self._is_over(self.history)
        if stopped:
            self.reporter.report_stopped(self.history)
        elif len(self.history) < self.trial.config.recipe.epochs and dist.get_rank() == 0:
            _log.info("no better epoch for recipe.patience=%d epochs: finished", self.trial.config.recipe.patience)
        if self.logger is not None:
            best = None if stopped else self._best()
            stopped_by = f"{self.trial.grid}-{self.trial.profile}" if stopped else None
            self.logger.finish(best, stopped_by, _outage_timeout(self.trial.config))

    def _next_check(self, steps: int, seconds_per_step: float) -> int:
        every = self.trial.config.checkpointing.check_every_n_steps
        soon = steps + max(1, int(SECONDS_BETWEEN_CHECKS / seconds_per_step))
        return min(soon, (steps // every + 1) * every, self.train.steps)

    def _is_asked_to_stop(self) -> bool:
        if self.control.should_stop is None or dist.get_rank() != 0:
            return False
        if time.monotonic() - self._asked_at <= SECONDS_BETWEEN_CHECKS:
            return False
        self._asked_at = time.monotonic()
        return self.control.should_stop()

    def _continues(self, running: RunningEpoch) -> bool:
        """The decision of rank 0 between two epochs, broadcast to all ranks."""
        should_continue = self.control.should_continue
        if should_continue is None or not self.history or running.steps:
            return True
        top1 = [epoch.top1 or 0.0 for epoch in self.history]  # early stopping requires a validation after each epoch
        answer = [should_continue(self.trial.key, top1) if dist.get_rank() == 0 else True]
        dist.broadcast_object_list(answer)
        return answer[0]

    def _log_resumed(self, saved: Checkpoint | None) -> None:
        world = dist.get_world_size()
        if saved is not None:
            _log.info("resuming from %s, after epoch %d", saved.name, len(saved.history))
        if saved is not None and saved.workers != world:
            _log.warning(
                "the number of workers changed from %d to %d: BatchNorm resumes from the mean of the workers' statistics and "
                "sees a different part of each batch, so the result will differ as with another seed",
                saved.workers,
                world,
            )

    def _open_logger(self, resumed: bool) -> AsyncMetricLogger:
        from experiments.training.metric_logger import AsyncMetricLogger  # imports MLflow, which others do not need

        uri, images = self.workspace.tracking_uri, len(self.train.dataset)
        return AsyncMetricLogger(uri, self.trial, self.complexity, self.tags, images, resumed)

    def _best(self) -> Checkpoint | None:
        """The checkpoint whose weights are registered."""
        best = best_in(self.checkpoints.store, self.checkpoints.folder)
        if best is None or best.history[-1] != best_of(self.history):
            name = best.name if best else "no checkpoint"
            _log.warning("cannot read the checkpoint of the best epoch; registered instead: %s", name)
        return best


def _outage_timeout(config: TrialConfig) -> float:
    """For how long a server or a store may be away, while the other workers wait."""
    return min(OUTAGE_TIMEOUT, config.checkpointing.hang_timeout / 2)


@contextmanager
def trial_log(workspace: Workspace, trial: Trial, rank: int) -> Iterator[TextIO]:
    """Adds what this package logs to a trial's log on this node, which the node's workers share. In a bucket, the log is
    continued at the start and stored at the end.

    Raises:
        UserError: the file cannot be written.
    """
    path = workspace.log(trial)
    if not path.exists():
        with suppress(StorageError):  # reported by whoever needs the bucket for more
            workspace.store.download(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot write the log ({error.strerror}); choose another folder with --runs") from None
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter(f"%(asctime)s worker {rank}: %(message)s"))
    logger = logging.getLogger("experiments")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield file
    finally:
        logger.removeHandler(handler)
        file.close()
        with suppress(StorageError):
            workspace.store.upload(path)
