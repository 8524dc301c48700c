"""Models that users register. `tests/clients/test_timm.py` covers those of timm."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import san
from san.models import ModuleSpec
from san.models.registry import VARIANTS


@pytest.fixture(autouse=True)
def forget_registered() -> Iterator[None]:
    before = dict(VARIANTS)
    yield
    VARIANTS.clear()
    VARIANTS.update(before)


def tiny(num_classes: int, in_channels: int = 3, widths: tuple[int, ...] = (8,), bias: bool = True) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(in_channels, widths[0], 3, bias=bias)]
    layers += [nn.Conv2d(before, after, 3) for before, after in itertools.pairwise(widths)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], num_classes))


def test_registered_model_is_built_counted_and_stored_like_the_others(tmp_path: Path) -> None:
    san.register_model("tiny")(tiny)
    assert "tiny" in san.list_models()
    model = san.create_model("tiny", 10, in_channels=1, widths=[4, 6]).eval()
    images_NCHW = torch.randn(2, 1, 16, 16)
    logits_NC = model(images_NCHW)
    assert isinstance(logits_NC, Tensor) and logits_NC.shape == (2, 10)
    counted = san.complexity(model, 16)
    assert counted.params == sum(parameter.numel() for parameter in model.parameters())
    assert counted.flops_paper == sum(part.flops_paper for part in counted.stages) > 0
    san.save_checkpoint(model, tmp_path / "tiny.pt")
    loaded = san.load_checkpoint(tmp_path / "tiny.pt")
    assert loaded.spec == model.spec
    torch.testing.assert_close(loaded(images_NCHW), logits_NC)


def test_a_class_is_registered_like_a_function() -> None:
    @san.register_model("net")
    class Net(nn.Module):
        def __init__(self, num_classes: int, in_channels: int = 3, width: int = 4) -> None:
            super().__init__()
            self.layer = nn.Linear(in_channels * width, num_classes)

        def forward(self, x_NCHW: Tensor) -> Tensor:
            return self.layer(x_NCHW[:, :, :1, : self.layer.in_features // x_NCHW.shape[1]].flatten(1))

    assert san.create_model("net", 10, width=5)(torch.randn(2, 3, 8, 8)).shape == (2, 10)


def test_model_may_read_numbers_from_tensors_when_it_is_built() -> None:
    """As published networks do for the rates of stochastic depth; it is checked and counted on the meta device."""

    @san.register_model("net")
    def net(num_classes: int, in_channels: int = 3, rate: float = 0.1) -> nn.Module:
        rates = [each.item() for each in torch.linspace(0, rate, 3)]
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(rates[-1]), nn.Linear(in_channels, num_classes))

    model = san.create_model("net", 10, rate=0.2)
    model.spec.check_input(8)
    with torch.device("meta"):
        assert san.complexity(model.spec.build(10), 8).params == 40


def test_file_of_a_model_that_is_not_registered_says_so(tmp_path: Path) -> None:
    san.register_model("tiny")(tiny)
    san.save_checkpoint(san.create_model("tiny", 10), tmp_path / "tiny.pt")
    del VARIANTS["tiny"]
    with pytest.raises(san.CheckpointError, match=r"unknown model 'tiny'.*an imported file registers"):
        san.load_checkpoint(tmp_path / "tiny.pt")


def test_registration_rejects_our_names_and_parameters_that_cannot_be_fields() -> None:
    with pytest.raises(ValueError, match="choose another name"):
        san.register_model("resnet26")(tiny)
    with pytest.raises(ValueError, match="choose another name"):
        san.register_model("resnet26_cifar10")(tiny)
    with pytest.raises(ValueError, match="choose another name"):
        san.register_model("timm/tiny")(tiny)
    with pytest.raises(ValueError, match="needs the name"):
        san.register_model(tiny)  # type: ignore[arg-type]
    for function in (lambda num_classes, in_channels, depth=1: None, lambda num_classes, in_channels, depth: None):
        with pytest.raises(ValueError, match="depth needs a type hint and a default"):
            san.register_model("other")(function)  # type: ignore[arg-type, return-value]

    def with_list(num_classes: int, in_channels: int, widths: list[int] = [8]) -> nn.Module:  # noqa: B006
        return nn.Identity()

    with pytest.raises(ValueError, match="widths must be a number, a text, a tuple or None"):
        san.register_model("other")(with_list)


def test_copies_and_pickles_have_the_same_spec() -> None:
    san.register_model("tiny")(tiny)
    model = san.create_model("tiny", 10, widths=[4])
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.spec == model.spec
        torch.testing.assert_close(again.state_dict(), model.state_dict())


def test_what_needs_the_parts_of_a_model_is_refused() -> None:
    san.register_model("tiny")(tiny)
    model = san.create_model("tiny", 10)
    model.set_drop_rates(0.0)
    model.set_grad_checkpointing(False)
    for refused in (lambda: model.set_drop_rates(0.1), model.set_grad_checkpointing, lambda: model.reset_classifier(5)):
        with pytest.raises(ValueError, match=r"of tiny (is|are) not known"):
            refused()


def test_own_model_can_be_replaced() -> None:
    san.register_model("tiny")(tiny)
    san.register_model("tiny")(lambda num_classes, in_channels: nn.Linear(3, num_classes))
    assert isinstance(VARIANTS["tiny"], ModuleSpec)
    assert isinstance(san.create_model("tiny", 10).get_submodule("module"), nn.Linear)


def test_images_and_logits_that_do_not_fit_are_explained() -> None:
    san.register_model("tiny")(tiny)
    VARIANTS["tiny"].check_input(3)
    with pytest.raises(ValueError, match="tiny cannot classify images of 2 x 2 pixels"):
        VARIANTS["tiny"].check_input(2)
    san.register_model("maps")(lambda num_classes, in_channels: nn.Conv2d(in_channels, num_classes, 1))
    with pytest.raises(ValueError, match=r"must return logits \[N, num_classes\], here \[1, 2\], not \[1, 2, 8, 8\]"):
        VARIANTS["maps"].check_input(8)
    san.register_model("text")(lambda num_classes, in_channels: "a model")  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"must return a torch\.nn\.Module, not str"):
        san.create_model("text")
    with pytest.raises(ValueError, match="features_only"):
        san.create_model("tiny", features_only=True)
    san.register_model("lazy")(lambda num_classes, in_channels: nn.LazyLinear(num_classes))
    with pytest.raises(ValueError, match="must know their sizes"):
        VARIANTS["lazy"].check_input(8)
