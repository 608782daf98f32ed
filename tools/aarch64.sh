#!/usr/bin/env bash
# Runs tests as an aarch64 program under qemu: the NEON kernels against their definitions, where no
# such processor is at hand. It says nothing about speed. `cargo test -p rust-mlx-cpu-kernels` runs
# the same kernels on any processor with emulated intrinsics; here the intrinsics are the
# compiler's. qemu's own processor has all extensions, and the tests go through the kernels with and
# without dotprod. A second run, on a processor that lacks it, shows that nothing else needs it.
#
#   tools/aarch64.sh                    the unit tests of the kernels' crate, which needs no MLX
#   tools/aarch64.sh --arrays           those of mlx-rs-core that use the kernels; builds MLX's C API
#   tools/aarch64.sh -p CRATE ARGS      other arguments of `cargo test`
#
# Needs Linux (Debian: apt install qemu-user-static g++-aarch64-linux-gnu; for mlx-rs-core also
# cmake ninja-build libclang-dev) and the standard library of the target: rustup target add
# aarch64-unknown-linux-gnu, or RUSTC with a compiler that has it. Not part of CI.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

needs() {
    for program in "$@"; do
        command -v "$program" > /dev/null || { echo "$program is not installed" >&2; exit 2; }
    done
}

needs qemu-aarch64-static aarch64-linux-gnu-g++
target=aarch64-unknown-linux-gnu
root=/usr/aarch64-linux-gnu
library="$("${RUSTC:-rustc}" --print target-libdir --target "$target")"
[[ -d "$library" ]] || { echo "there is no standard library for $target in $library" >&2; exit 2; }

export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L $root"

if [[ $# -eq 0 ]]; then
    cargo test -p rust-mlx-cpu-kernels --target "$target" --lib
    QEMU_CPU=cortex-a72 cargo test -p rust-mlx-cpu-kernels --target "$target" --lib -- gemm:: simd::
    exit
fi

# What mlx-sys builds. Build scripts run here, so what they compile for themselves is for this
# machine.
export CXX=aarch64-linux-gnu-g++ HOST_CC=cc HOST_CXX=c++
export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc AR_aarch64_unknown_linux_gnu=aarch64-linux-gnu-ar
BINDGEN_EXTRA_CLANG_ARGS="-isystem $("$CXX" -print-file-name=include) -isystem $root/include"
export BINDGEN_EXTRA_CLANG_ARGS
# The libraries that come with MLX find each other when they run; a linker for another machine does
# not look for them.
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS="-C link-arg=-Wl,--allow-shlib-undefined"

if [[ "$1" != --arrays ]]; then
    exec cargo test --target "$target" "$@"
fi
needs cmake ninja
cargo test -p rust-mlx-core --target "$target" --lib cpu::
QEMU_CPU=cortex-a72 cargo test -p rust-mlx-core --target "$target" --lib cpu::tests::products
