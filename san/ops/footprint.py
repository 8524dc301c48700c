"""Checks of footprints, which are square and odd, have stride 1 and are reflected at the border."""

from __future__ import annotations

from san.choice import ModelError


def check_side(kernel_size: int) -> None:
    """Checks that a footprint has a central pixel.

    Raises:
        ModelError: `kernel_size` is even or not positive.
    """
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ModelError(f"the footprint must be odd and positive (1, 3, 5, ...), not {kernel_size}")


def check_footprint(kernel_size: int, height: int, width: int) -> None:
    """Checks that a footprint fits a map.

    Reflection mirrors the map at its border pixel, so half of the footprint must be smaller than each side.

    Raises:
        ModelError: `kernel_size` is even or not positive, or the map is too small for it.
    """
    check_side(kernel_size)
    least = kernel_size // 2 + 1
    if height < least or width < least:
        raise ModelError(
            f"a {kernel_size}x{kernel_size} footprint with reflection padding needs a feature map of at least {least}x{least}, "
            f"not {height}x{width}; use a smaller footprint or larger images"
        )
