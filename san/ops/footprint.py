"""The geometry of a footprint, in one place: square, odd, stride 1, reflected at the border."""

from __future__ import annotations


def check_side(kernel_size: int) -> None:
    """Refuses a footprint without a pixel in its middle.

    Raises:
        ValueError: even or non-positive `kernel_size`.
    """
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"the footprint must be odd and positive (1, 3, 5, ...), not {kernel_size}")


def check_footprint(kernel_size: int, height: int, width: int) -> None:
    """Refuses a footprint that a map cannot carry.

    Reflection mirrors the map at its border pixel, so half of the footprint must be smaller than each side.

    Raises:
        ValueError: even or non-positive `kernel_size`, or a map [H, W] that is too small; the text names both.
    """
    check_side(kernel_size)
    least = kernel_size // 2 + 1
    if height < least or width < least:
        raise ValueError(
            f"a {kernel_size}x{kernel_size} footprint with reflection padding needs a feature map of at least {least}x{least}, "
            f"not {height}x{width}; use a smaller footprint or larger images"
        )
