"""Holds the built distributions to the version of the checkout, and to what must be in them.

Arguments: the folder with three wheels and three sdists.
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION_FILE = ROOT / "src" / "forerun" / "core" / "version.py"
ALONE = ("forerun_bench", "forerun_train")  # beside `forerun`, and of its version
KEPT = {"assets", "evals/data", "kernels", "server/static"}  # of `forerun`, besides modules
SUFFIXES = {".cu", ".cuh", ".cpp", ".h", ".json", ".jsonl", ".safetensors", ".html", ".js", ".css"}


def sources(package: Path) -> set[str]:
    """What of a package must be in its wheel: modules, and the data that is used at run time."""
    files = [path.relative_to(package) for path in package.rglob("*") if path.is_file()]
    data = [f for f in files if any(f.is_relative_to(folder) for folder in KEPT)]
    wanted = [f for f in files if f.suffix == ".py" or f.name == "py.typed"]
    wanted += [f for f in data if f.suffix in SUFFIXES]
    return {f"{package.name}/{f.as_posix()}" for f in wanted}


def problems(folder: Path, name: str, version: str) -> list[str]:
    """What is wrong with the wheel and the sdist of a distribution."""
    (wheel,) = folder.glob(f"{name}-*.whl")
    (sdist,) = folder.glob(f"{name}-*.tar.gz")
    found = [f"{file.name} is not of {version}" for file in (wheel, sdist)
             if not file.name.startswith(f"{name}-{version}")]  # fmt: skip
    (package,) = ROOT.glob(f"*/{name}") if name == "forerun" else ROOT.glob(f"*/src/{name}")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (path,) = (each for each in names if each.endswith(".dist-info/METADATA"))
        needed = message_from_string(archive.read(path).decode()).get_all("Requires-Dist", [])
    with tarfile.open(sdist) as archive:
        packed = {each.partition("/")[2] for each in archive.getnames()}
    found += [f"{wheel.name} lacks {each}" for each in sorted(sources(package) - names)]
    strays = (each for each in names if not each.startswith((f"{name}/", f"{name}-{version}.")))
    found += [f"{wheel.name} has {each}" for each in strays]
    found += [
        f"{sdist.name} lacks {each}" for each in ("LICENSE", "README.md") if each not in packed
    ]
    found += [f"{sdist.name} has {each}" for each in packed if each.startswith("tests/")]
    if not any("/licenses/LICENSE" in each for each in names):
        found.append(f"{wheel.name} lacks the license")
    if name in ALONE and f"forerun=={version}" not in needed:
        found.append(f"{wheel.name} does not need forerun=={version}")
    return found


def main(folder: Path) -> None:
    match = re.search(r'^__version__ = "(.+)"$', VERSION_FILE.read_text("utf-8"), re.MULTILINE)
    assert match is not None
    found = [each for name in ("forerun", *ALONE) for each in problems(folder, name, match[1])]
    sys.exit("\n".join(found) or 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
