"""Ship configs/ inside the package, for `hfgolf train --config small`. setup.cfg says the rest."""

from setuptools import find_packages, setup

INSIDE = {"hfgolf.configs": "configs"}  # no copy in git: the build makes it

setup(packages=[*find_packages(include=["hfgolf*"]), *INSIDE], package_dir=INSIDE)
