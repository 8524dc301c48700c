"""The part of the packaging that needs code; the rest is in pyproject.toml.

A wheel contains only the library: `san` and `cuda_ext`. The system's packages have names that would collide with others in
site-packages, so only an editable install of a clone has them, and the command `san`.
"""

from setuptools import find_packages, setup
from setuptools.command.editable_wheel import editable_wheel


class EditableWheel(editable_wheel):
    """Adds the system to the library."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.distribution.packages += find_packages(include=["pipelines*", "experiments*", "cluster*"])
        self.distribution.entry_points = {"console_scripts": ["san=experiments.__main__:main"]}
        self.dist_info_dir = None  # not the metadata that pip has prepared, which lack the command


setup(packages=find_packages(include=["san*", "cuda_ext*"]), cmdclass={"editable_wheel": EditableWheel})
