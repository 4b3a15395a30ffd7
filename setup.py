"""Ship scripts/ and configs/ inside the package, for the command `hfgolf`. setup.cfg says the rest."""

from setuptools import find_packages, setup

INSIDE = {"hfgolf.scripts": "scripts", "hfgolf.configs": "configs"}  # no copies in git: the build makes them

setup(packages=[*find_packages(include=["hfgolf*"]), *INSIDE], package_dir=INSIDE)
