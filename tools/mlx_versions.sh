#!/usr/bin/env bash
# Runs the tests of the bindings, the arrays, the engine and the contract with each mlx-c that this
# project builds: the pinned ones, and 0.4.1 from its own repository. A directory in MLX_C_0_4 is
# taken for 0.4.1 instead.
#
#   tools/mlx_versions.sh            # all
#   tools/mlx_versions.sh 0.5 0.7    # some
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# One target directory for all: what does not depend on MLX is built once.
export CARGO_INCREMENTAL=0
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/mlx-versions"
started=$SECONDS
failed=()

for version in "${@:-0.4 0.5 0.7}"; do
    for minor in $version; do
        printf '\n==> [%5ss] mlx-c %s\n' "$((SECONDS - started))" "$minor"
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
        # A failure does not keep the other versions from being tested.
        cargo test --locked --no-fail-fast \
            -p rust-mlx-sys -p rust-mlx-core -p rust-mlx-metal-backend || failed+=("$minor")
        cargo test --locked --no-fail-fast -p rust-mlx --test engine --test files \
            --test conformance ||
            failed+=("$minor")
    done
done
if [[ ${#failed[@]} -gt 0 ]]; then
    printf '\n==> [%5ss] failed with mlx-c: %s\n' "$((SECONDS - started))" "${failed[*]}"
    exit 1
fi
printf '\n==> [%5ss] all passed\n' "$((SECONDS - started))"
