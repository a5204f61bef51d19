#!/usr/bin/env bash
# Measures ringweave on a machine with one GPU, in stages; see one_gpu.py for the stages and the results.
#
#   bash bench/gpu/one_gpu.sh --out results                        # ringweave is installed
#   bash bench/gpu/one_gpu.sh --out results --wheels .gpu/wheels --iproute .gpu/iproute
#   bash bench/gpu/one_gpu.sh --device cpu --short --out /tmp/try  # without a GPU: tries the script itself
#
# --wheels DIR   installs all wheels of DIR into a temporary folder first (no network, no dependencies)
# --iproute DIR  uses the programs ip, tc, ... of DIR (DIR/bin, which finds its libraries by itself)
# All other options go to one_gpu.py.
set -u
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/one_gpu.XXXXXX")
trap 'rm -rf "$work"' EXIT
wheels="" iproute="" rest=()
while [ $# -gt 0 ]; do
    case "$1" in
        --wheels) wheels=$2; shift 2 ;;
        --iproute) iproute=$2; shift 2 ;;
        *) rest+=("$1"); shift ;;
    esac
done
python=${PYTHON:-python3}
install_note="ringweave as installed"
if [ -n "$wheels" ]; then
    started=$(date +%s)
    if "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" "$wheels"/*.whl \
        >"$work/pip.log" 2>&1; then
        install_note="$(ls "$wheels"/*.whl | wc -l) wheels from $wheels in $(($(date +%s) - started)) s"
    else
        install_note="pip failed: $(tail -n 3 "$work/pip.log" | tr '\n' ' ')"
    fi
    export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
    export PATH="$work/site/bin:$PATH"
fi
if [ -n "$iproute" ]; then
    iproute=$(cd "$iproute" && pwd)
    export PATH="$PATH:$iproute/bin"
fi
export ONE_GPU_INSTALL_NOTE="$install_note" ONE_GPU_WORK="$work" PYTHONUNBUFFERED=1
"$python" "$here/one_gpu.py" ${rest[@]+"${rest[@]}"}
