"""Adds proto/ to the wheel, as fourfold/protos. Everything else about the distribution is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithProtos(build_py):
    """Copies the packages, and the .proto files with their descriptor set."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # there, fourfold.contract finds proto/ itself
            self.copy_tree("proto", str(Path(self.build_lib, "fourfold", "protos")))


setup(cmdclass={"build_py": BuildWithProtos})
