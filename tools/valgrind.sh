#!/usr/bin/env bash
# Runs tests of mlx-rs-core under valgrind's memcheck: reads and writes out of bounds, use after free, values never
# written, and leaks that are certain. A fault ends the test's process with status 99 and fails the run.
#
#   tools/valgrind.sh                       the suites below
#   tools/valgrind.sh arrays::io            a binary of mlx-rs-core, or tests of one by the start of their names
#
# Needs valgrind (Linux). Not part of CI: it takes minutes, and says nothing on a machine without it. Tests whose
# children are processes of their own are followed into them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

command -v valgrind > /dev/null || { echo "valgrind is not installed" >&2; exit 2; }

suites=("$@")
if [[ ${#suites[@]} -eq 0 ]]; then
    suites=(processes::leaks processes::stress processes::devices processes::closure_leaks processes::async_failure
        arrays::indexing arrays::operators arrays::conversions arrays::display arrays::io arrays::hazards arrays::faults
        limits::soundness_ops limits::soundness_products arrays::soundness_memory
        transforms::callbacks transforms::soundness_vmap programs)
fi

# Fewer random cases: each costs some 30 times as much.
export PROPTEST_CASES="${PROPTEST_CASES:-16}" RUST_MLX_STRESS_ROUNDS="${RUST_MLX_STRESS_ROUNDS:-2}"
host="$(rustc -vV | sed -n 's/^host: //p')"
runner="CARGO_TARGET_$(tr 'a-z-' 'A-Z_' <<< "$host")_RUNNER"
# Fair scheduling: memcheck runs one thread at a time, and a thread that spins for a lock would keep the others from it.
# Without `possible`: thread stacks and C++ containers with interior pointers look like that.
export "$runner"="valgrind --quiet --error-exitcode=99 --fair-sched=yes --trace-children=yes --num-callers=30 \
--leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite"

failed=0
for suite in "${suites[@]}"; do
    binary="${suite%%::*}" filter=()
    [[ "$suite" == "$binary" ]] || filter=("${suite#*::}::")
    cargo test -p rust-mlx-core --test "$binary" -- "${filter[@]}" || failed=1
done
[[ "$failed" == 0 ]] || exit 1
echo "valgrind found nothing in: ${suites[*]}"
