"""Makes a wheel of the package and a library that Cargo built, with the standard library alone.

    wheel.py PACKAGES LIBRARY VERSION DIRECTORY

Prints the wheel's path. `tools/dist.py wheel` makes the wheel that is given to others.
"""

import sys
import sysconfig
import zipfile
from pathlib import Path

packages, library, version, out = sys.argv[1:]
platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
tag = f"cp38-abi3-{platform}"
info = f"rust_mlx-{version}.dist-info"
files = {
    f"{info}/METADATA": f"Metadata-Version: 2.1\nName: rust-mlx\nVersion: {version}\n",
    f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: {tag}\n",
    "rust_mlx/_native.abi3.so": Path(library).read_bytes(),
}
for path in sorted(Path(packages, "rust_mlx").iterdir()):
    if path.is_file():
        files[f"rust_mlx/{path.name}"] = path.read_bytes()
record = f"{info}/RECORD"
files[record] = "".join(f"{name},,\n" for name in [*files, record])
wheel = Path(out, f"rust_mlx-{version}-{tag}.whl")
with zipfile.ZipFile(wheel, "w") as archive:
    for name, data in files.items():
        archive.writestr(name, data)
print(wheel)
