#!/usr/bin/env bash
# Runs tests of mlx-rs-core under valgrind's memcheck: reads and writes out of bounds, use after free, values never
# written, and leaks that are certain. A fault ends the test's process with status 99 and fails the run.
#
#   tools/valgrind.sh                       the suites below
#   tools/valgrind.sh indexing io           these test binaries of mlx-rs-core
#
# Needs valgrind (Linux). Not part of CI: it takes minutes, and says nothing on a machine without it. Tests whose
# children are processes of their own are followed into them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

command -v valgrind > /dev/null || { echo "valgrind is not installed" >&2; exit 2; }

suites=("$@")
if [[ ${#suites[@]} -eq 0 ]]; then
    suites=(leaks stress indexing operators conversions display devices io hazards callbacks closure_leaks async_failure faults soundness_ops soundness_products soundness_memory soundness_vmap programs)
fi

# Fewer random cases: each costs some 30 times as much.
export PROPTEST_CASES="${PROPTEST_CASES:-16}" RUST_MLX_STRESS_ROUNDS="${RUST_MLX_STRESS_ROUNDS:-2}"
host="$(rustc -vV | sed -n 's/^host: //p')"
runner="CARGO_TARGET_$(tr 'a-z-' 'A-Z_' <<< "$host")_RUNNER"
# Fair scheduling: memcheck runs one thread at a time, and a thread that spins for a lock would keep the others from it.
# Without `possible`: thread stacks and C++ containers with interior pointers look like that.
export "$runner"="valgrind --quiet --error-exitcode=99 --fair-sched=yes --trace-children=yes --num-callers=30 \
--leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite"

arguments=()
for suite in "${suites[@]}"; do
    arguments+=(--test "$suite")
done
cargo test -p rust-mlx-core "${arguments[@]}" --no-fail-fast
echo "valgrind found nothing in: ${suites[*]}"
