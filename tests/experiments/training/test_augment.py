"""Random augmentation: each operation against Pillow, whose results torchvision's definitions follow."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from experiments.training.augment import BINS, Augmentation, operations
from pipelines import Transform

SIZE = 24
CPU = torch.device("cpu")


def photo(seed: int) -> Image.Image:
    """A smooth image, with a few values in one of its channels."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    pixels = np.asarray(small).copy()
    pixels[..., 1] = pixels[..., 1] // 64 * 20 + 50
    return Image.fromarray(pixels)


def as_batch(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None] / 255


def moved(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


PILLOW = {
    "identity": lambda image, s: image,
    "shear_x": lambda image, s: moved(image, 1, -s, 0, 0, 1, 0),
    "shear_y": lambda image, s: moved(image, 1, 0, 0, -s, 1, 0),
    "translate_x": lambda image, s: moved(image, 1, 0, -int(s), 0, 1, 0),
    "translate_y": lambda image, s: moved(image, 1, 0, 0, 0, 1, -int(s)),
    "rotate": lambda image, s: image.rotate(s),
    "brightness": lambda image, s: ImageEnhance.Brightness(image).enhance(1 + s),
    "color": lambda image, s: ImageEnhance.Color(image).enhance(1 + s),
    "contrast": lambda image, s: ImageEnhance.Contrast(image).enhance(1 + s),
    "sharpness": lambda image, s: ImageEnhance.Sharpness(image).enhance(1 + s),
    "posterize": lambda image, s: ImageOps.posterize(image, round(s)),
    "solarize": lambda image, s: ImageOps.solarize(image, 255 * s),
    "autocontrast": lambda image, s: ImageOps.autocontrast(image),
    "equalize": lambda image, s: ImageOps.equalize(image),
}
OPERATIONS = dict(zip(PILLOW, operations(SIZE), strict=True))


@pytest.mark.parametrize("name", PILLOW)
@given(st.integers(0, 1000), st.integers(0, BINS - 1), st.sampled_from([-1, 1]), st.booleans())
def test_operations_agree_with_pillow(name: str, seed: int, number: int, sign: int, is_rand: bool) -> None:
    operation = OPERATIONS[name]
    ends = operation.rand if is_rand else operation.trivial
    # A little less, so that no pixel is exactly at a threshold or between two others.
    strength = 0.9999 * float(torch.linspace(*ends, BINS)[number]) * (sign if operation.signed else 1)
    image = photo(seed)
    ours = operation.change(as_batch(image), torch.tensor([strength]))
    difference = (ours - as_batch(PILLOW[name](image, strength))).abs() * 255
    # Pillow rounds intermediate values, and may choose the other neighbor in rows that lie almost between two.
    assert (difference.amax(1) > 2.01).float().mean() <= (0.2 if name in ("shear_x", "shear_y", "rotate") else 0)


def test_solarize_inverts_its_threshold_in_spite_of_rounding() -> None:
    transform, levels = Transform(), torch.arange(256)
    for mean, std in zip(transform.mean, transform.std, strict=True):
        values = (levels.float() / 255 - mean) / std * std + mean
        for threshold in torch.linspace(1, 0, BINS):
            changed = OPERATIONS["solarize"].change(values.view(1, 1, 16, 16), threshold[None]).flatten()
            inverted = levels >= round(255 * threshold.item(), 3)
            assert torch.equal((255 * changed).round(), torch.where(inverted, 255 - levels, levels).float())


@pytest.mark.parametrize(("policy", "most"), [("trivial", 1), ("rand", 2)])
def test_policies_change_each_image_on_its_own(policy: str, most: int) -> None:
    """All operations occur, and the pixels stay between black and white."""
    transform = Transform(size=SIZE, resize=SIZE)
    augment = Augmentation(policy, transform, CPU)
    mean, std = torch.tensor(transform.mean)[:, None, None], torch.tensor(transform.std)[:, None, None]
    images_NCHW = (as_batch(photo(0)).expand(600, 3, SIZE, SIZE) - mean) / std
    torch.manual_seed(0)
    changed = augment(images_NCHW)
    pixels = changed * std + mean
    assert pixels.min() > -1e-5 and pixels.max() < 1 + 1e-5
    kinds = len({image.mul(1e4).round().numpy().tobytes() for image in pixels})
    same = (changed - images_NCHW).abs().amax((1, 2, 3)) < 1e-5
    expected = (1 / len(operations(SIZE))) ** most
    assert kinds > 14 * most and expected / 2 < same.float().mean() < 6 * expected
    torch.manual_seed(0)
    assert torch.equal(augment(images_NCHW), changed)
