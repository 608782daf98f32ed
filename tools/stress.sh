#!/usr/bin/env bash
# Runs the tests that start processes, servers and terminals again and again beside busy loops. Such a test
# must not depend on who is faster.
#
#   tools/stress.sh                 20 rounds beside 4 busy loops
#   ROUNDS=3 LOOPS=8 tools/stress.sh
#   tools/stress.sh launch::        only tests of this name
#
# The exit status is 1 when a round failed. What it printed is kept in target/stress.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

rounds="${ROUNDS:-20}" loops="${LOOPS:-4}" out=target/stress
mkdir -p "$out"
rm -f "$out"/*.log

# Crate and test binary.
binaries=(
    "rust-mlx processes"
    "rust-mlx serve"
    "rust-mlx cli"
    "rust-mlx hub"
    "rust-mlx train"
    "rust-mlx-mlxlm-backend bridge"
    "rust-mlx-inference-server server"
    "rust-mlx-core processes"
)

# They are built before anything is busy.
for pair in "${binaries[@]}"; do
    read -r crate binary <<< "$pair"
    cargo test --quiet --locked --no-run -p "$crate" --test "$binary" || exit 1
done

busy=()
trap 'kill "${busy[@]}" 2> /dev/null' EXIT
for _ in $(seq "$loops"); do
    (while :; do :; done) &
    busy+=("$!")
done

failed=0
for round in $(seq "$rounds"); do
    for pair in "${binaries[@]}"; do
        read -r crate binary <<< "$pair"
        log="$out/$crate-$binary-$round.log"
        if cargo test --quiet --locked -p "$crate" --test "$binary" -- "$@" > "$log" 2>&1; then
            rm "$log"
        else
            failed=$((failed + 1))
            echo "round $round: $crate $binary failed: $log" >&2
        fi
    done
    echo "round $round of $rounds: $failed failures so far"
done
[[ "$failed" == 0 ]]
