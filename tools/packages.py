#!/usr/bin/env python3
"""Packs every crate of the workspace as for the index, and checks what is in it.

    tools/packages.py            packs and checks, without building (seconds)
    tools/packages.py --verify   also builds each package from its own files (minutes)
    tools/packages.py --docs     also builds the documentation with DOCS_RS set, as docs.rs does,
                                 and without a network where the system allows that

A package must build from its own files, name its license, and have a readme that stands alone:
links out of the package lead nowhere on the index. Needs Cargo and Python's standard library.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PREFIX = "rust-mlx"
# The index refuses more than 10 MiB; ours have no reason to come near.
LARGEST = 2 * 2**20
# Tests, golden files and measurements stay in the repository. What mlx-sys reads in its build must
# be there: `vendor/mlx-c` once was not, since Cargo leaves out directories with a Cargo.toml.
NEEDED = {
    "rust-mlx-sys": [
        "build/env.rs",
        "shim/error_format.h",
        "src/bindings/0.7.rs",
        "vendor/pins.json",
        "vendor/mlx-c/0.7/lock.toml",
        "vendor/mlx-c/0.7/manifest.toml",
        "vendor/superbuild/CMakeLists.txt",
    ],
    "rust-mlx-inference-c": ["cbindgen.toml", "include/rust_mlx.h"],
    "rust-mlx-inference-python": [
        "python/rust_mlx/__init__.py",
        "python/rust_mlx/_native.pyi",
    ],
    "rust-mlx-mlxlm-backend": ["src/bridge.py"],
    "rust-mlx": ["CHANGELOG.md", "examples/generate.rs", "src/main.rs"],
}


def members():
    """The workspace's packages that are published, by name."""
    command = ["cargo", "metadata", "--no-deps", "--format-version", "1", "--locked"]
    metadata = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    packages = {p["name"]: p for p in metadata["packages"] if p["publish"] is None}
    return packages, Path(metadata["target_directory"])


def manifest_faults(package):
    for field in ("description", "license", "repository", "readme", "keywords", "categories"):
        if not package[field]:
            yield f"the manifest has no {field}"
    if not (package["name"] == PREFIX or package["name"].startswith(f"{PREFIX}-")):
        yield f"the name is not of the family {PREFIX}-*"
    if not (package["metadata"] or {}).get("docs", {}).get("rs"):
        yield "the manifest has no [package.metadata.docs.rs]"


def archive_faults(package, path):
    root = f"{package['name']}-{package['version']}/"
    with tarfile.open(path) as archive:
        files = {m.name.removeprefix(root): m for m in archive.getmembers()}
        for name in ("README.md", "LICENSE-MIT", "LICENSE-APACHE", *NEEDED.get(package["name"], ())):
            member = files.get(name)
            if member is None or not member.isreg() or member.size == 0:
                yield f"{name} is missing, empty or no file"
        for name in files:
            if name.split("/")[0] in ("tests", "benches", "target", "fuzz"):
                yield f"{name} does not belong into a package"
        if path.stat().st_size > LARGEST:
            yield f"{path.stat().st_size} bytes are more than {LARGEST}"
        if "README.md" in files:
            readme = archive.extractfile(files["README.md"]).read().decode()
            if readme.splitlines()[0] != f"# {package['name']}":
                yield "README.md does not begin with the package's name"
            # The index resolves links of the package in the repository's root only.
            if package["name"] != PREFIX:
                for link in re.findall(r"\]\(([^)]+)\)", readme):
                    if not link.startswith(("https://", "#")):
                        yield f"README.md links to {link}, which the index does not have"


def without_network(command):
    """The command in a namespace that has no network, where the system allows one."""
    wrapped = ["unshare", "--net", "--map-root-user"]
    allowed = subprocess.run([*wrapped, "true"], capture_output=True, check=False).returncode == 0
    if not allowed:
        print("(no namespaces here: the network stays reachable)", file=sys.stderr)
    return [*wrapped, *command] if allowed else command


def document(names):
    environment = {**os.environ, "DOCS_RS": "1", "RUSTDOCFLAGS": "-D warnings"}
    arguments = [part for name in names for part in ("-p", name)]
    # A target directory of its own: what earlier builds left must not help.
    command = ["cargo", "doc", "--no-deps", "--offline", "--locked", *arguments]
    command += ["--target-dir", "target/docs-rs"]
    subprocess.run(without_network(command), cwd=ROOT, env=environment, check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--verify", action="store_true", help="build each package from its own files")
    parser.add_argument("--docs", action="store_true", help="build the documentation as docs.rs does")
    options = parser.parse_args()
    packages, target = members()
    command = ["cargo", "package", "--quiet", "--locked", "--allow-dirty"]
    command += [part for name in packages for part in ("-p", name)]
    if not options.verify:
        command.append("--no-verify")
    result = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    # Cargo warns about each test and measurement that stays behind.
    lines = [line for line in result.stderr.splitlines() if "is not included in the published" not in line]
    print("\n".join(lines), file=sys.stderr, end="\n" if lines else "")
    if result.returncode != 0:
        sys.exit(result.returncode)
    faults = []
    for name, package in sorted(packages.items()):
        path = target / "package" / f"{name}-{package['version']}.crate"
        package_faults = [*manifest_faults(package), *archive_faults(package, path)]
        faults += [f"{name}: {fault}" for fault in package_faults]
        print(f"{name} {package['version']}: {path.stat().st_size // 1024} KiB")
    if faults:
        sys.exit("\n".join(faults))
    if options.docs:
        document(packages)


if __name__ == "__main__":
    main()
