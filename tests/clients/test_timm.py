"""timm's model protocol, as in timm's own tests of its models (tests/test_models.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

timm = pytest.importorskip("timm", reason="timm is missing: run `make test-clients`")

import san.timm  # noqa: E402
from san.models.base import BaseModel  # noqa: E402
from san.models.registry import VARIANTS  # noqa: E402

KINDS = ("san10_pairwise", "san10_patchwise", "san10_scalar", "san_resnet26")
NAMES = [name for name, variant in san.timm.VARIANTS.items() if variant in VARIANTS]
SMALL = {"width_mult": 0.5, "num_stages": 3}
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def small(name: str, **settings: object) -> BaseModel:
    model: BaseModel = timm.create_model(name, **{"num_classes": 10, **SMALL, **settings})
    return model


def test_forward_and_backward() -> None:
    for name in NAMES:
        model = small(name).train()
        logits = model(IMAGES)
        assert logits.shape == (2, 10) and logits.isfinite().all(), name
        logits.mean().backward()
        missing = [key for key, parameter in model.named_parameters() if parameter.grad is None]
        assert not missing, name


def test_default_config() -> None:
    for name in KINDS:
        model = small(name).eval()
        config = model.pretrained_cfg  # type: ignore[union-attr]
        assert timm.data.resolve_data_config({}, model=model)["input_size"] == (3, 224, 224), name
        assert f"{config['first_conv']}.weight" in model.state_dict(), name
        assert f"{config['classifier']}.weight" in model.state_dict(), name
        assert isinstance(model.get_classifier(), nn.Linear), name

        features = model.forward_features(IMAGES)
        assert features.shape[1] == model.num_features == model.head_hidden_size, name
        assert model.forward_head(features, pre_logits=True).shape == (2, model.num_features), name
        torch.testing.assert_close(model.forward_head(features), model(IMAGES))

        model.reset_classifier(0)
        assert model(IMAGES).shape == (2, model.num_features) == small(name, num_classes=0).eval()(IMAGES).shape, name
        model.reset_classifier(7, "avg")
        assert model(IMAGES).shape == (2, 7) and model.num_classes == 7, name


def test_features() -> None:
    for name in ("san10_pairwise", "san_resnet26"):
        whole = small(name).eval()
        maps = timm.create_model(name, features_only=True, out_indices=(0, 2), **SMALL).eval()
        found = maps(IMAGES)
        assert [x.shape[1] for x in found] == maps.feature_info.channels(), name
        assert [64 // x.shape[2] for x in found] == maps.feature_info.reduction(), name
        last, chosen = whole.forward_intermediates(IMAGES, indices=2)
        assert torch.equal(last, chosen[-1]) and len(chosen) == 2, name
        torch.testing.assert_close(last, whole.forward_features(IMAGES))
        for row in whole.feature_info:
            module = row["module"]
            assert hasattr(whole.get_submodule(module), "weight") or module in whole.stage_names, (name, module)


def test_networks_with_weights_give_their_maps_and_forget_other_classes() -> None:
    maps = timm.create_model("san10_pairwise_cifar10", pretrained=True, features_only=True)
    assert [x.shape[1] for x in maps(IMAGES)] == maps.feature_info.channels()
    assert "label_names" in timm.create_model("san10_pairwise_cifar10", pretrained=True).pretrained_cfg
    other = timm.create_model("san10_pairwise_cifar10", pretrained=True, num_classes=7)
    assert isinstance(other, BaseModel) and "label_names" not in other.pretrained_cfg


def test_drop_rates() -> None:
    model = small("san10_pairwise", drop_rate=0.5, drop_path_rate=0.2)
    rates = [module.drop_path_rate for module in model.modules() if isinstance(module, san.nn.SelfAttentionBlock)]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    model.train()
    assert not torch.equal(model(IMAGES), model(IMAGES))
    plain = small("san10_pairwise").eval()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(IMAGES), plain(IMAGES))


def test_layer_decay_groups_blocks() -> None:
    from timm.optim import param_groups_layer_decay

    for name in ("san10_pairwise", "san_resnet26"):
        model = small(name)
        groups = param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.5)
        scale = {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}
        assert len(scale) == len(list(model.parameters())), name
        scales = {key: scale[id(parameter)] for key, parameter in model.named_parameters()}
        first, last = model.stage_names[0], model.stage_names[-1]
        stem = model.pretrained_cfg["first_conv"]  # type: ignore[index]
        of = {part: max(value for key, value in scales.items() if key.startswith(part)) for part in (stem, first, last)}
        assert of[stem] < of[first] < of[last] < scales[f"{model.classifier_name}.weight"] == 1, name


def test_gray_images_and_odd_sizes() -> None:
    model = small("san10_patchwise", in_chans=1).eval()
    assert model(torch.randn(1, 1, 72, 90)).shape == (1, 10)


def test_pretrained_networks() -> None:
    with pytest.raises(ValueError, match="san10_patchwise_cifar10"):
        timm.create_model("san10_pairwise", pretrained=True)
    for name, ours in san.timm.VARIANTS.items():
        if ours in san.list_models(pretrained=True):
            model = timm.create_model(name, pretrained=True).eval()
            assert torch.equal(model(IMAGES), san.create_model(ours, pretrained=True)(IMAGES))
            assert timm.data.resolve_model_data_config(model)["input_size"] == (3, 48, 48)
            assert timm.create_model(name, pretrained=True, num_classes=7)(IMAGES).shape == (2, 7)


@pytest.mark.slow
def test_timms_training_script_trains_a_variant(tmp_path: Path) -> None:
    """The loop of timm's train.py: optimizer, schedule, average of weights and mixup, for a few steps."""
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3

    model = small("san10_pairwise", drop_path_rate=0.1).train()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.8)
    schedule = CosineLRScheduler(optimizer, t_initial=12)
    average, mixup = ModelEmaV3(model, decay=0.9), Mixup(mixup_alpha=0.2, num_classes=10)
    losses = []
    for step in range(12):
        images, targets = mixup(IMAGES, torch.tensor([1, 2]))
        loss = SoftTargetCrossEntropy()(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model)
        schedule.step(step)
        losses.append(loss.item())
    assert sum(losses[-3:]) < sum(losses[:3])
    torch.save(average.module.state_dict(), tmp_path / "average.pt")
    restored = timm.create_model("san10_pairwise", num_classes=10, checkpoint_path=str(tmp_path / "average.pt"), **SMALL)
    assert torch.equal(restored.eval()(IMAGES), average.module.eval()(IMAGES))


def test_model_of_timm_is_a_row_like_ours() -> None:
    model = san.create_model("timm/convnext_atto", 10, drop_path_rate=0.1)
    assert model.num_classes == 10 and model(torch.randn(2, 3, 64, 64)).shape == (2, 10)
    assert san.complexity(model, 224).params == sum(parameter.numel() for parameter in model.parameters())
    san.create_model("timm/vit_tiny_patch16_224", 10, img_size=32).spec.check_input(32)
    san.create_model("timm/densenet121", 10).spec.check_input(32)  # has no stochastic depth
    assert san.complexity(san.create_model("timm/pit_ti_224", 10), 224).flops_paper > 10**8  # passes its token to submodules
    with pytest.raises(ValueError, match="has no model 'convnext_attto'; did you mean `timm/convnext_atto`"):
        san.create_model("timm/convnext_attto")


GRID = """
question: Does a model of timm train?
rows: [{id: timm, model: {name: timm/test_resnet}}]
"""


def test_grid_trains_a_model_of_timm(tmp_path: Path) -> None:
    from experiments.config.grid import GridRequest
    from experiments.evaluation.evaluate import evaluate_checkpoint, open_checkpoint, open_images
    from experiments.runner.grid_run import open_grid_run
    from experiments.training.trainer import run_trial

    (tmp_path / "grid.yaml").write_text(GRID)
    overrides = "recipe.epochs=2", "recipe.batch_size=20", "data.train_per_class=24"
    grid_run = open_grid_run(GridRequest(tmp_path / "grid.yaml", "digits", overrides, tmp_path / "runs"))
    grid_run.tracker.prepare(grid_run.grid, tmp_path / "runs" / "artifacts")
    (trial,) = grid_run.trials
    run_trial(grid_run.workspace, trial, lambda metrics: None)
    metrics = grid_run.tracker.results()[trial.key].metrics
    opened = open_checkpoint(grid_run.workspace.checkpoints(trial))
    found = evaluate_checkpoint(opened, open_images(opened))
    assert (found.model, found.top1) == ("timm/test_resnet", metrics["summary/best_top1"])
