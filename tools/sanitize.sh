#!/usr/bin/env bash
# Runs the tests of mlx-cpu-kernels under AddressSanitizer: reads and writes out of bounds and use after free in
# our Rust code. `tools/valgrind.sh` does the same for mlx-rs-core with libmlx, which is not instrumented.
#
#   tools/sanitize.sh
#
# Needs the sanitizer's runtime of the toolchain (Linux), which stable toolchains have. Not part of CI. Assembly
# is not instrumented.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

host="$(rustc -vV | sed -n 's/^host: //p')"
# Sanitizers are an unstable option of the compiler; a target directory of their own keeps other builds.
export RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address" CARGO_TARGET_DIR=target/sanitize
for set in portable avx2 avx512 amx; do
    echo "MLX_CPU_KERNELS=$set"
    MLX_CPU_KERNELS="$set" cargo test -p rust-mlx-cpu-kernels --lib --target "$host"
done
