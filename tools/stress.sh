#!/usr/bin/env bash
# Runs the tests that start processes, servers and terminals again and again beside busy loops. Such a test
# must not depend on who is faster.
#
#   tools/stress.sh                 20 rounds beside 4 busy loops
#   AT_ONCE=4 tools/stress.sh       the same, with four rounds beside each other
#   ROUNDS=3 LOOPS=8 tools/stress.sh
#   tools/stress.sh launch::        only tests of this name
#
# The exit status is 1 when a round failed. What it printed is kept in target/stress.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

rounds="${ROUNDS:-20}" loops="${LOOPS:-4}" at_once="${AT_ONCE:-1}" out=target/stress
mkdir -p "$out"
rm -f "$out"/*.log

# Test binaries. Two crates have one named `processes`; both run. The workspace's features are those of
# `cargo test --workspace`, so that its builds are used.
binaries=(processes serve cli hub train bridge server)

# They are built before anything is busy, and then run without Cargo: sources may change meanwhile.
# Each line has a binary, a tab, and the directory of its package.
programs="$(
    for binary in "${binaries[@]}"; do
        cargo test --quiet --locked --no-run --workspace --test "$binary" --message-format json \
            || exit 1
    done | python3 -c '
import json, pathlib, sys
seen = set()
for line in sys.stdin:
    made = json.loads(line)
    if made.get("executable") and made["target"]["kind"] == ["test"]:
        seen.add((made["executable"], str(pathlib.Path(made["manifest_path"]).parent)))
print("\n".join("\t".join(each) for each in sorted(seen)))
'
)" || exit 1
CARGO="$(command -v cargo)"
export CARGO

# Runs one round. Prints what failed.
round() {
    local number="$1" name log program package failed=0
    shift
    while IFS=$'\t' read -r program package; do
        name="$(basename "${program%-*}")"
        log="$PWD/$out/$(basename "$package")-$name-$number.log"
        if (cd "$package" && CARGO_MANIFEST_DIR="$package" "$program" --quiet "$@") > "$log" 2>&1 < /dev/null; then
            rm "$log"
        else
            failed=1
            echo "round $number: $name failed: $log"
        fi
    done <<< "$programs"
    echo "round $number of $rounds ended"
    return "$failed"
}

busy=()
trap 'kill "${busy[@]}" 2> /dev/null' EXIT
for _ in $(seq "$loops"); do
    (while :; do :; done) &
    busy+=("$!")
done

failed=0 running=()
for number in $(seq "$rounds"); do
    round "$number" "$@" &
    running+=("$!")
    if (( ${#running[@]} == at_once || number == rounds )); then
        for pid in "${running[@]}"; do
            wait "$pid" || failed=$((failed + 1))
        done
        running=()
        echo "$number of $rounds rounds: $failed failed"
    fi
done
[[ "$failed" == 0 ]]
