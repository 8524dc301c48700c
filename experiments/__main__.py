"""`san`, also `python -m experiments`. The library has the script too, and may be installed without what the command needs."""

from __future__ import annotations

import sys

PACKAGES = ("san", "cuda_ext", "pipelines", "cluster", "experiments")


def main() -> None:
    """Runs the command, or tells what has to be installed for it."""
    try:
        from experiments.cli import main as command

        command()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in PACKAGES:
            raise
        sys.exit(
            f"san: the package {error.name} is not installed; install the command's dependencies with "
            "`pip install 'san-attention[experiments]'`"
        )


if __name__ == "__main__":
    main()
