"""Finds the packages, also in sources without symbolic links, as Windows and some archives leave them."""

from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.editable_wheel import editable_wheel

# A clone has links to these folders inside of lightning_pipes, so that Python, Hydra and mypy find them there. A source
# distribution has the folders themselves. Where links are not supported, there is a text file or nothing.
LINKS = {"lightning_pipes.strategies": "strategies", "lightning_pipes.conf": "conf"}


class EditableWheel(editable_wheel):
    """Refuses to install sources whose packages cannot be imported from where they are."""

    def run(self) -> None:
        mapped = set(LINKS).intersection(self.distribution.package_dir)
        if mapped:
            raise SystemExit(
                f"{' and '.join(sorted(mapped))} cannot be imported from these sources, because the symbolic links in "
                "lightning_pipes/ are missing, and an editable install needs them. Clone the repository with `git "
                "clone -c core.symlinks=true`, or install a copy with `pip install .`, which needs no links."
            )
        super().run()


packages = find_namespace_packages(include=["lightning_pipes*", "hydra_plugins.*"])
package_dir = {
    "": "."
}  # as "" alone, `pip install -e .` writes a .pth: with a finder, Hydra and mypy miss the packages
for name, folder in LINKS.items():
    if Path(name.replace(".", "/"), "__init__.py").is_file():
        continue
    if not Path(folder, "__init__.py").is_file():
        raise SystemExit(
            f"{name} cannot be built: neither {folder}/ nor a link to it is in these sources. Take a whole clone or a "
            "source distribution."
        )
    package_dir[name] = folder
    packages += [name, *(f"{name}.{each}" for each in find_namespace_packages(folder))]

setup(packages=packages, package_dir=package_dir, cmdclass={"editable_wheel": EditableWheel})
