#!/usr/bin/env python3
"""Makes what people install, and shows that it works: a Python wheel and a Debian package.

    tools/dist.py wheel          target/dist/rust_mlx-VERSION-cp38-abi3-PLATFORM.whl
    tools/dist.py deb            target/dist/rust-mlx_VERSION_ARCH.deb
    tools/dist.py check          installs both as another user finds them, and generates with each

Both hold the program and MLX's library, as `mlx self bundle` lays them out. The wheel also holds the
Python module `rust_mlx`, which `check` imports with this Python. `check` needs root: it
makes a root directory that holds the package, the C and C++ libraries and a model, and nothing else:
no cache, no network, no other program. In it user 65534 runs `mlx backends` and `mlx generate`.

Linux only. Needs what a build needs; `wheel` also maturin (`pip install maturin`), `deb` and `check`
dpkg. `--program FILE` takes a program that was built before; maturin builds the module, with
`--profile`. NAME of `--model` is fetched with `mlx pull`.
"""

import argparse
import gzip
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "target/dist"
NOBODY = 65534


def run(command, **options):
    print("+", *command, file=sys.stderr)
    return subprocess.run([str(part) for part in command], check=True, **options)


def output(command):
    return run(command, stdout=subprocess.PIPE, text=True).stdout


def fresh(path):
    """An empty directory."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def version():
    command = ["cargo", "metadata", "--no-deps", "--format-version", "1"]
    packages = json.loads(output(command))["packages"]
    return next(p["version"] for p in packages if p["name"] == "rust-mlx")


def glibc():
    """The minor version of the C library: what is built here needs it, and MLX needs 35."""
    return max(35, int(platform.libc_ver()[1].split(".")[1]))


def program(options):
    """The program to put into packages."""
    if options.program:
        return options.program.resolve()
    run(["cargo", "build", "--locked", "--bin", "mlx", "--profile", options.profile], cwd=ROOT)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return target / ("debug" if options.profile == "dev" else options.profile) / "mlx"


def bundle(options):
    """bin/mlx, and MLX's library in lib/rust-mlx."""
    directory = fresh(OUT / "bundle")
    run([program(options), "self", "bundle", directory], stdout=subprocess.DEVNULL)
    return directory


def make_wheel(options):
    stage = fresh(OUT / "python")
    made = bundle(options)
    shutil.copytree(made / "lib", stage / "data/data/lib")
    scripts = fresh(stage / "data/scripts")
    shutil.copy(made / "bin/mlx", scripts)
    run(["strip", scripts / "mlx"])
    shutil.copytree(
        ROOT / "inference-python/python", stage / "python", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("LICENSE-MIT", "LICENSE-APACHE"):
        shutil.copy(ROOT / name, stage)
    shutil.copytree(ROOT / "dist/python", stage, dirs_exist_ok=True)
    for old in OUT.glob("*.whl"):
        old.unlink()
    maturin = shutil.which("maturin") or sys.exit("maturin is needed: pip install maturin")
    tag = f"manylinux_2_{glibc()}"
    command = [maturin, "build", "--profile", options.profile, "--compatibility", tag, "--out", OUT]
    # MLX's library and the program are data, which maturin neither checks nor changes; they and the
    # module need the C library alone, so that there is nothing to repair.
    run([*command, "--auditwheel", "skip"], cwd=stage)
    (wheel,) = OUT.glob("*.whl")
    return wheel


CONTROL = """\
Package: rust-mlx
Version: {version}
Architecture: {architecture}
Maintainer: rust-mlx contributors <https://github.com/rust-mlx/rust-mlx>
Installed-Size: {size}
Depends: libc6 (>= 2.{glibc}), libgcc-s1, libstdc++6 (>= 12)
Recommends: ca-certificates, python3-pip
Section: science
Priority: optional
Homepage: https://github.com/rust-mlx/rust-mlx
Description: run language models on Apple's MLX
 The program mlx generates text, talks, serves models over HTTP, fine-tunes and
 converts them. MLX's library is part of the package.
"""

COPYRIGHT = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: rust-mlx
Source: https://github.com/rust-mlx/rust-mlx

Files: *
Copyright: rust-mlx contributors
License: MIT or Apache-2.0

Files: usr/lib/rust-mlx/*
Copyright: Apple Inc. and others
License: MIT
Comment: MLX's Python package, from which this comes, carries libraries of others: BLAS and LAPACK
 (BSD-3-Clause), libgfortran (GPL-3 with the GCC Runtime Library Exception) and libquadmath
 (LGPL-2.1-or-later).

License: Apache-2.0
 On Debian systems the text is in /usr/share/common-licenses/Apache-2.0.

License: MIT
"""


def make_deb(options):
    stage = fresh(OUT / "deb")
    shutil.copytree(bundle(options), stage / "usr")
    mlx = stage / "usr/bin/mlx"
    run(["strip", mlx])
    documents = stage / "usr/share/doc/rust-mlx"
    documents.mkdir(parents=True)
    text = (ROOT / "LICENSE-MIT").read_text(encoding="utf-8")
    lines = (f" {line}" if line else " ." for line in text.splitlines())
    (documents / "copyright").write_text(COPYRIGHT + "\n".join(lines) + "\n", encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_bytes()
    (documents / "changelog.gz").write_bytes(gzip.compress(changes, mtime=0))
    pages = stage / "usr/share/man/man1"
    pages.mkdir(parents=True)
    run([mlx, "man", pages], stdout=subprocess.DEVNULL)
    for page in pages.iterdir():
        page.with_name(f"{page.name}.gz").write_bytes(gzip.compress(page.read_bytes(), mtime=0))
        page.unlink()
    for shell, name in (
        ("bash", "bash-completion/completions/mlx"),
        ("zsh", "zsh/vendor-completions/_mlx"),
        ("fish", "fish/vendor_completions.d/mlx.fish"),
    ):
        path = stage / "usr/share" / name
        path.parent.mkdir(parents=True)
        path.write_text(output([mlx, "completions", shell]), encoding="utf-8")
    for path in [stage, *stage.rglob("*")]:
        executable = path.is_dir() or path == mlx
        path.chmod(0o755 if executable else 0o644)
    files = [path for path in stage.rglob("*") if path.is_file()]
    architecture = output(["dpkg", "--print-architecture"]).strip()
    control = stage / "DEBIAN"
    control.mkdir()
    size = sum(path.stat().st_size for path in files) // 1024
    fields = {"version": version(), "architecture": architecture, "size": size, "glibc": glibc()}
    (control / "control").write_text(CONTROL.format(**fields), encoding="utf-8")
    package = OUT / f"rust-mlx_{fields['version']}_{architecture}.deb"
    run(["dpkg-deb", "--root-owner-group", "--build", stage, package], stdout=subprocess.DEVNULL)
    return package


def system_libraries(files):
    """The system's libraries that some files need, by the loader's own answer."""
    needed = set()
    for path in files:
        result = subprocess.run(["ldd", path], capture_output=True, text=True, check=False)
        needed.update(re.findall(r"(/\S+) \(0x", result.stdout))
    return {name for name in needed if not name.startswith(str(OUT))}


def empty_root(directory, package, model):
    """A root with an installed package, the libraries it depends on and a model."""
    for name in ("proc", "tmp", "usr/bin", "usr/lib"):
        (directory / name).mkdir(parents=True)
    # As in Debian, where / has links into /usr.
    for name in ("lib", "lib64"):
        (directory / name).symlink_to("usr/lib")
    if package.suffix == ".deb":
        (directory / "var/lib/dpkg").mkdir(parents=True)
        (directory / "var/lib/dpkg/status").touch()
        # Its dependencies are copied below, which dpkg cannot know.
        command = ["dpkg", f"--root={directory}", "--force-depends", "--force-not-root"]
        run([*command, "--install", package], stdout=subprocess.DEVNULL)
    else:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        command += ["--disable-pip-version-check", "--root-user-action", "ignore"]
        run([*command, "--prefix", directory / "usr", package])
    mlx = directory / "usr/bin/mlx"
    for name in system_libraries([mlx, *directory.rglob("*.so*")]):
        if name.startswith(str(directory)):
            continue
        target = directory / "usr/lib" / Path(name).name
        shutil.copy(name, target)
    # The loader's own directories, which differ among systems.
    loader = re.search(r"interpreter: ([^\]]+)\]", output(["readelf", "-l", mlx]))
    path = directory / loader[1].lstrip("/")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(f"/usr/lib/{path.name}")
    shutil.copy(model, directory / "model.gguf")
    directory.chmod(0o755)


def answer(directory, *arguments):
    """What `mlx` prints in that root, for a user who owns nothing in it."""
    command = ["unshare", "--mount", "--pid", "--fork", "--net", f"--mount-proc={directory}/proc"]
    command += [shutil.which("chroot"), f"--userspec={NOBODY}:{NOBODY}", directory, "/usr/bin/mlx", *arguments]
    environment = {"PATH": "/usr/bin", "HOME": "/nowhere"}
    return run(command, stdout=subprocess.PIPE, text=True, env=environment).stdout


def check(package, model):
    OUT.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="root-", dir=OUT))
    try:
        empty_root(directory, package, model)
        installed = directory / "usr/lib/rust-mlx"
        if not list(installed.glob("*/mlx/lib/libmlx.so")):
            sys.exit(f"{package.name} puts no library of MLX into usr/lib/rust-mlx")
        backends = answer(directory, "backends")
        if not re.search(r"^cpu\b.* yes ", backends, re.MULTILINE):
            sys.exit(f"cpu is not available after an installation of {package.name}:\n{backends}")
        question = "What is the capital of France?"
        reply = answer(directory, "generate", "--model", "/model.gguf", "--max-tokens", "32", question)
        if "Paris" not in reply:
            sys.exit(f"the program of {package.name} answered {reply!r}")
        print(f"{package.name} ({package.stat().st_size >> 20} MiB): {reply.strip()}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


# What the module does, and that MLX's library is that of the wheel.
MODULE = '''
import sys, rust_mlx
model = rust_mlx.load(sys.argv[1], "cpu")
reply = model.generate([{"role": "user", "content": "What is the capital of France?"}], max_tokens=32)
(libmlx,) = {line.split()[-1] for line in open("/proc/self/maps") if line.rstrip().endswith("/libmlx.so")}
assert libmlx.startswith(sys.prefix + "/lib/rust-mlx/"), libmlx
print(reply)
'''


def check_module(wheel, model):
    """Imports the module in an environment that has only the wheel."""
    directory = Path(tempfile.mkdtemp(prefix="module-", dir=OUT))
    try:
        run([sys.executable, "-m", "venv", directory])
        python = directory / "bin/python"
        command = [python, "-m", "pip", "install", "--quiet", "--no-index"]
        run([*command, "--disable-pip-version-check", wheel])
        environment = {"PATH": "/usr/bin", "HOME": "/nowhere", "MLX_OFFLINE": "1"}
        command = [python, "-c", MODULE, model]
        reply = run(command, stdout=subprocess.PIPE, text=True, env=environment).stdout
        if "Paris" not in reply:
            sys.exit(f"the module of {wheel.name} answered {reply!r}")
        print(f"import rust_mlx: {reply.strip()}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("what", choices=["wheel", "deb", "check"], nargs="+")
    parser.add_argument("--profile", default="dist", help="Cargo's profile (dist)")
    parser.add_argument("--program", type=Path, help="a program that was built before")
    parser.add_argument("--model", default="smollm2", help="a name, or a GGUF file (smollm2)")
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        sys.exit("packages are made on Linux")
    OUT.mkdir(parents=True, exist_ok=True)
    made = []
    if "wheel" in options.what:
        made.append(make_wheel(options))
    if "deb" in options.what:
        made.append(make_deb(options))
    for path in made:
        print(path)
    if "check" in options.what:
        if os.geteuid() != 0:
            sys.exit("`check` needs root, for a root directory of its own")
        model = Path(options.model)
        if not model.is_file():
            model = Path(output([OUT / "bundle/bin/mlx", "pull", options.model]).strip())
        if model.is_dir():
            (model,) = model.glob("*.gguf")
        made = made or sorted([*OUT.glob("*.whl"), *OUT.glob("*.deb")])
        if not made:
            sys.exit("there is nothing to check: make a wheel or a deb first")
        for path in made:
            check(path, model)
            if path.suffix == ".whl":
                check_module(path, model)


if __name__ == "__main__":
    main()
