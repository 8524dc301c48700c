"""Entry point of `san` and `python -m experiments`. Its dependencies may be missing if only the library is installed."""

from __future__ import annotations

import sys

PACKAGES = ("san", "cuda_ext", "pipelines", "cluster", "experiments")


def main() -> None:
    """Runs the command, or prints which package is missing."""
    try:
        from experiments.cli.commands import main as command

        command()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in PACKAGES:
            raise
        sys.exit(
            f"san: the package {error.name} is not installed; install the command's dependencies with "
            "`pip install -e '.[experiments]'` in the clone"
        )


if __name__ == "__main__":
    main()
