"""What happens to an image between file and network, as a value; `pipelines.graph` carries it out."""

from dataclasses import dataclass

from pipelines.errors import DataError

RGB = tuple[float, float, float]

IMAGENET_MEAN: RGB = (0.485, 0.456, 0.406)
IMAGENET_STD: RGB = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True, slots=True)
class Transform:
    """Random resized crop and flip for training, resize and centre crop for validation.

    The defaults are the paper's values for ImageNet.

    Raises:
        DataError: a field is outside the range that its description names.
    """

    size: int = 224
    """Side of the square that the network sees, pixels."""
    resize: int = 256
    """Length of the shorter side before the centre crop of validation, pixels; at least `size`."""
    crop_area: tuple[float, float] = (0.08, 1.0)
    """Least and greatest area of the random crop, as parts of the image, within 0..1."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Least and greatest width / height of the random crop."""
    flip: bool = True
    """Mirror half of the training images left to right."""
    mean: RGB = IMAGENET_MEAN
    """Subtracted from red, green, blue in 0..1."""
    std: RGB = IMAGENET_STD
    """Divides after that; above 0."""

    def __post_init__(self) -> None:
        area, ratio = self.crop_area, self.crop_ratio
        demands = (
            (self.size >= 1, f"size must be at least 1 pixel, not {self.size}"),
            (self.resize >= self.size, f"resize must be at least size ({self.size}), not {self.resize}"),
            (0 < area[0] <= area[1] <= 1, f"crop_area must rise within 0..1, not {area}"),
            (0 < ratio[0] <= ratio[1], f"crop_ratio must rise from above 0, not {ratio}"),
            (len(self.mean) == 3, f"mean must be three numbers (red, green, blue), not {self.mean}"),
            (len(self.std) == 3 and min(self.std) > 0, f"std must be three numbers above 0, not {self.std}"),
        )
        broken = [sentence for holds, sentence in demands if not holds]
        if broken:
            raise DataError(f"The image transform cannot be used: {'; '.join(broken)}.")
