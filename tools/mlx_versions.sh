#!/usr/bin/env bash
# Runs the tests of the bindings, the arrays and the engine with each mlx-c that this project builds:
# the pinned ones, and 0.4.1 from its own repository. A directory in MLX_C_0_4 is taken for 0.4.1
# instead.
#
#   tools/mlx_versions.sh            # all
#   tools/mlx_versions.sh 0.5 0.7    # some
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# One target directory for all would build everything again for each.
export CARGO_INCREMENTAL=0
target="${CARGO_TARGET_DIR:-target}"

for version in "${@:-0.4 0.5 0.7}"; do
    for minor in $version; do
        printf '\n==> mlx-c %s\n' "$minor"
        unset MLX_C_VERSION MLX_C_FETCH MLX_C_SOURCE_DIR
        case "$minor" in
            0.4)
                if [[ -n "${MLX_C_0_4:-}" ]]; then
                    export MLX_C_SOURCE_DIR="$MLX_C_0_4"
                else
                    export MLX_C_FETCH=upstream
                fi
                ;;
            *) export MLX_C_VERSION="$minor" ;;
        esac
        export CARGO_TARGET_DIR="$target/mlx-c-$minor"
        cargo test --locked --no-fail-fast \
            -p rust-mlx-sys -p rust-mlx-core -p rust-mlx-metal-backend
        cargo test --locked --no-fail-fast -p rust-mlx --test engine --test files
    done
done
printf '\n==> all passed\n'
