"""Trains a model with DeepSpeed: optimizer, schedule, averaging of gradients, CUDA graphs. The only file that imports
deepspeed."""

from __future__ import annotations

import atexit
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from experiments.config.config import EngineConfig, RecipeConfig
from experiments.errors import UserError
from experiments.training.augment import Augmentation
from experiments.training.recipe import MixedBatch, erased, frozen_parts, mixed, optimizer, schedule

DEFAULT_CONFIG = EngineConfig()
ALIGNMENT = 32
"""Each gradient starts at a multiple of this number of elements, so that kernels can read it 16 bytes at a time."""


def join_process_group(device: torch.device) -> None:
    """A single worker creates a process group of its own, without a port or variables that child processes would mistake for
    theirs; several workers are in one already."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # otherwise nccl uses the first GPU for every worker
    if not dist.is_initialized():
        alone = dist.HashStore()  # type: ignore[attr-defined]
        backend, on_gpu = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, device_id=on_gpu)
        atexit.register(_leave_process_group)  # NCCL warns if nobody does
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed requires it


def _leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def numerics(config: EngineConfig, device: torch.device) -> Iterator[None]:
    """Inside the block, TF32 and deterministic algorithms are as configured.

    With `deterministic`, torch raises RuntimeError if an operation has no deterministic algorithm. On a GPU, the block must be
    entered before the first matrix product of the process.
    """
    # Not `fp32_precision`: torch's compiler still reads the older names, which raise after the newer one was set.
    with_tf32: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn) if device.type == "cuda" else ()
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    try:
        tf32_before = [each.allow_tf32 for each in with_tf32]
    except RuntimeError:  # imported code has set `fp32_precision`
        tf32_before = []
    for each in with_tf32:
        each.allow_tf32 = bool(config.on(device.type).tf32)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
        for each, value in zip(with_tf32, tf32_before, strict=False):
            each.allow_tf32 = value


class Engine:
    """Trains one model in step with the other workers.

    Args:
        model: on this worker's device; trained in place.
        recipe: the settings that affect the result.
        steps: optimizer steps per epoch, for the schedule.
        micro_batch: images of this worker in a step, or in each part of a step if gradients are accumulated.
        config: how the steps are computed.
        augment: changes the images of each step.
        class_weight_C: weights of the classes in the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: RecipeConfig,
        steps: int,
        micro_batch: int,
        config: EngineConfig = DEFAULT_CONFIG,
        augment: Augmentation | None = None,
        class_weight_C: Tensor | None = None,
    ) -> None:
        self.device = next(model.parameters()).device
        deepspeed = _import_deepspeed(self.device)
        config = config.on(self.device.type)
        self.recipe, self.augment = recipe, augment
        self._class_weight_C = None if class_weight_C is None else class_weight_C.to(self.device)
        if recipe.sync_batchnorm:
            _require_plain_norms(model)
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self._frozen = frozen_parts(model, recipe.freeze)
        # An exponential moving average of weights and BatchNorm statistics; it begins as a copy.
        self._average: AveragedModel | None = None
        if recipe.ema_decay:
            self._average = AveragedModel(model, multi_avg_fn=_averaging(recipe.ema_decay), use_buffers=True)
        self.optimizer = optimizer(model, recipe)
        self.schedule = schedule(self.optimizer, recipe, steps)
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=self.optimizer,
            lr_scheduler=self.schedule,
            config=_deepspeed_config(recipe, micro_batch),
        )
        if config.channels_last:
            for each in self._models():
                _lay_channels_last(each)
        # DeepSpeed would copy every gradient into a new buffer and back in every step.
        self._engine.enable_backward_allreduce = False
        self._gradients: Tensor | None = None
        # DeepSpeed walks through the module tree in every step to clear gradients; the optimizer has a list.
        self._engine.zero_grad = self.optimizer.zero_grad
        if dist.get_world_size() > 1 or config.cuda_graphs:
            self._gradients = _flat_gradients(self.module)
            self._engine.zero_grad = self._gradients.zero_
        if config.compile:
            # A process may train several models, and torch stops compiling after a number of different ones.
            torch.compiler.reset()
            # Not the module itself, because DeepSpeed's hooks would break the graph. An epoch has at most two batch sizes, so
            # code is compiled for each of them: code for all sizes would be slower.
            setattr(self.module, "forward", torch.compile(self.module.forward, dynamic=False))  # noqa: B010 (mypy)
        self._forward_backward = self._run
        if config.cuda_graphs:
            assert self._gradients is not None, "gradients stay in one place"
            self._forward_backward = StepGraphs(self._run, [self._gradients, *self.module.buffers()])

    @property
    def module(self) -> nn.Module:
        """The model that is trained."""
        return self._engine.module

    @property
    def model(self) -> nn.Module:
        """The model that is validated: the averaged one if the recipe has `ema_decay`, otherwise the trained one."""
        return self.module if self._average is None else self._average.module

    def train(self) -> None:
        """Sets the trained model to training mode, except its frozen parts."""
        self.module.train()
        for part in self._frozen:
            part.eval()

    @property
    def lr(self) -> float:
        """Learning rate of the next step, of the classifier if `recipe.layer_decay` lowers that of the others."""
        return float(self.optimizer.param_groups[0]["lr"])

    def train_step(self, images_NCHW: Tensor, labels_N: Tensor) -> Tensor:
        """Makes one optimizer step with gradients averaged over the workers. Returns this worker's mean loss and share of
        correct predictions, [2]; with mixup or CutMix, those of the mixed labels."""
        mean_2 = torch.zeros(2, device=self.device)
        if self.augment is not None:
            images_NCHW = self.augment(images_NCHW)
        images_NCHW = erased(images_NCHW, self.recipe.random_erasing)
        parts = mixed(images_NCHW, labels_N, self.recipe).parts(self.recipe.grad_accum_steps)
        for number, part in enumerate(parts, start=1):
            mean_2 += self._forward_backward(part, len(labels_N))
            if number == len(parts):
                self._average_gradients()
            self._engine.step()  # DeepSpeed counts the parts and updates weights only after the last
        if self._average is not None:
            self._average.update_parameters(self.module)
        return mean_2

    def _run(self, part: MixedBatch, images: int) -> Tensor:
        """Adds the gradients of a part of a step with `images` images in total; returns the part's share of the result."""
        logits_NC = self._engine(part.images_NCHW)
        share = len(part.labels_N) / images  # sizes of parts may differ by one
        loss = share * part.loss(logits_NC, self.recipe.label_smoothing, self._class_weight_C)
        self._engine.backward(loss, scale_wrt_gas=False)
        return torch.stack((loss.detach(), share * part.accuracy(logits_NC)))

    def _average_gradients(self) -> None:
        """Averages over the workers with a single request."""
        if self._gradients is not None and dist.get_world_size() > 1:
            dist.all_reduce(self._gradients)
            self._gradients.mul_(1 / dist.get_world_size())

    def is_finite(self) -> bool:
        """Whether all weights are finite; they may not be even if all losses were."""
        return all(bool(weight.isfinite().all()) for weight in self.module.parameters())

    def average_buffers(self) -> None:
        """Averages the BatchNorm statistics over the workers. DeepSpeed averages only gradients, so the statistics of each
        worker come from its own images, and validation would depend on the worker."""
        workers = dist.get_world_size()
        if workers == 1:
            return
        for model in self._models():
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    dist.all_reduce(buffer)
                    buffer /= workers

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to resume, identical on all workers; all workers must call this together.

        Within an epoch, BatchNorm statistics differ between workers: `workers` has the statistics and the random state of each
        worker. Python's and NumPy's random states are not saved, because training does not use them. `average` is the averaged
        model.
        """
        state = {
            "buffers": [_buffers(model) for model in self._models()],
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }
        workers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(workers, state)
        return {
            "model": self.module.state_dict(),
            "average": None if self._average is None else self._average.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "workers": workers,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes. If the number of workers has changed, the BatchNorm statistics are the mean over the earlier workers, and
        the random states are not restored."""
        workers = state["workers"]
        if len(workers) == dist.get_world_size():
            worker_state = workers[dist.get_rank()]
            buffers = worker_state["buffers"]
            torch.set_rng_state(worker_state["random"])
            if worker_state["cuda_random"] is not None and self.device.type == "cuda":
                torch.cuda.set_rng_state(worker_state["cuda_random"], self.device)
        else:
            buffers = _mean_buffers(workers)
        for model, weights, its_buffers in zip(self._models(), (state["model"], state["average"]), buffers, strict=False):
            model.load_state_dict(weights | its_buffers)
        if self._average is not None:
            self._average.n_averaged.fill_(1)  # with 0, the next update would copy the model
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])

    def _models(self) -> list[nn.Module]:
        """The trained model and, if there is one, the averaged model."""
        return [self.module] if self._average is None else [self.module, self._average.module]


def _averaging(decay: float) -> Callable[[Sequence[Tensor], Sequence[Tensor], Any], None]:
    """The moving average of floating-point tensors; the others, such as indices, are copied. torch would average and truncate
    them."""
    average: Any = get_ema_multi_avg_fn(decay)

    def update(averages: Sequence[Tensor], values: Sequence[Tensor], count: Any) -> None:
        if averages[0].is_floating_point():
            average(averages, values, count)
        else:
            for each, value in zip(averages, values, strict=True):
                each.copy_(value)

    return update


def _require_plain_norms(model: nn.Module) -> None:
    """Raises UserError if SyncBatchNorm would replace a norm that computes more, such as timm's with an activation."""
    plain = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
    if others := {type(layer).__name__ for layer in model.modules() if isinstance(layer, plain) and type(layer) not in plain}:
        raise UserError(f"recipe.sync_batchnorm: would remove what {', '.join(others)} add to BatchNorm; leave out this key")


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers in the state dict of a model, on the CPU."""
    state = model.state_dict()
    return {name: state[name].cpu() for name, _ in model.named_buffers() if name in state}


def _flat_gradients(model: nn.Module) -> Tensor:
    """Makes all gradients views of one tensor, whose address stays the same.

    Each view has the strides of its weight; otherwise, the optimizer would update the weights one by one.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    starts = list(itertools.accumulate((-(-weight.numel() // ALIGNMENT) * ALIGNMENT for weight in weights), initial=0))
    flat = weights[0].new_zeros(starts[-1])
    for weight, start in zip(weights, starts, strict=False):
        weight.grad = flat[start : start + weight.numel()].as_strided(weight.shape, weight.stride())
    return flat


def _lay_channels_last(model: nn.Module) -> None:
    """Converts the weights, and the images of each call."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.register_forward_pre_hook(_channels_last)


def _channels_last(model: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return inputs[0].contiguous(memory_format=torch.channels_last)


def validated_weights(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state dict of the validated model, from what `Engine.state_dict` returned."""
    weights = state["model"] if state["average"] is None else state["average"]
    return dict(weights | _mean_buffers(state["workers"])[-1])


def _mean_buffers(workers: Sequence[Mapping[str, Any]]) -> list[dict[str, Tensor]]:
    """Mean buffers of the trained model and, if there is one, of the averaged model."""
    models = zip(*(worker["buffers"] for worker in workers), strict=True)
    return [{name: _mean([buffers[name] for buffers in model]) for name in model[0]} for model in models]


def _mean(values: list[Tensor]) -> Tensor:
    """Mean over the workers; equal values, such as counters and averaged statistics, are returned unchanged."""
    first = values[0]
    same = all(map(first.equal, values)) or not first.is_floating_point()
    return first if same else torch.stack(values).mean(0)


def _import_deepspeed(device: torch.device) -> Any:
    # Otherwise DeepSpeed takes any GPU that it finds, which may belong to somebody else.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    import deepspeed

    if device.type == "cpu":
        # Otherwise DeepSpeed compiles its shared-memory all-reduce at the first start, which takes a minute and needs ninja.
        # For models of this size, plain gloo is as fast.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _deepspeed_config(recipe: RecipeConfig, micro_batch: int) -> dict[str, Any]:
    """States every setting that affects results, even if it is the default."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": recipe.grad_accum_steps,
        "gradient_clipping": 0.0,  # the default of DeepSpeed >= 0.19.3 is 1.0; the paper does not clip
        "torch_autocast": {
            "enabled": recipe.precision == "bfloat16",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],  # those in this list would have bfloat16 gradients
        },
        "steps_per_print": 1_000_000_000,
        "timers": {"throughput": {"enabled": False}},  # otherwise it synchronizes the GPU twice in every part of a step
    }


WARM_UP = 3
"""Number of runs before a capture, in which kernels are compiled and tuned and libraries allocate their workspaces."""

ForwardBackward = Callable[[MixedBatch, int], Tensor]


class StepGraphs:
    """Captures forward and backward once for each batch size, and replays them, which saves the CPU time of about 1,500
    launches per step.

    Args:
        run: runs forward and backward for a part of a step, given the number of images in the step; adds to gradients, whose
            addresses must not change, and returns a tensor.
        state: tensors that `run` changes, such as gradients and running statistics; they are restored after a capture.
    """

    def __init__(self, run: ForwardBackward, state: Iterable[Tensor]) -> None:
        self._run, self._state = run, list(state)
        # One memory pool for all batch sizes, because their graphs never run at the same time and a result is read before the
        # next replay. It must not outlive its graphs: torch refuses to capture into a pool whose graphs are gone.
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[tuple[int, int], tuple[MixedBatch, Callable[[], object], Tensor]] = {}

    def __call__(self, part: MixedBatch, images: int) -> Tensor:
        """Returns the result of `run`, which the next call overwrites."""
        size = len(part.labels_N), images
        if size not in self._captured:
            self._captured[size] = self._capture(part, images)
        static, replay, result = self._captured[size]
        for captured, source in zip(static.tensors, part.tensors, strict=True):
            captured.copy_(source)
        replay()
        return result

    def _capture(self, part: MixedBatch, images: int) -> tuple[MixedBatch, Callable[[], object], Tensor]:
        static = part.clone()
        before, random = [tensor.clone() for tensor in self._state], torch.cuda.get_rng_state()
        replay, result = record(lambda: self._run(static, images), self._pool)
        torch.cuda.set_rng_state(random)  # the warm-up has drawn numbers, and a resumed trial captures again
        for tensor, value in zip(self._state, before, strict=True):
            tensor.copy_(value)
        return static, replay, result


def record(run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], object], Tensor]:
    """Captures a function after a warm-up; returns a function that replays it, and the tensor with the result. `pool` holds the
    memory of the graph."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            run()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # The default, `global`, fails if a thread of the loader allocates memory during the capture.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = run()
    return graph.replay, result
