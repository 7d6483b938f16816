#!/usr/bin/env bash
# Creates the virtual environments of the peers that the benchmarks compare with: Gloo (PyTorch),
# OpenMPI (mpi4py) and Horovod. One that is there already is left alone.
#
#   benchmarks/peers/install.sh [DIR] [gloo] [mpi] [horovod]      DIR: benchmarks/peers/env
#
# PYTHON names the interpreter, one of 3.9 to 3.11 as TensorFlow 2.15 wants it. Horovod builds for
# about 6 minutes. The loop that times all-reduces is ours, and needs numpy and ml_dtypes.
set -euo pipefail
dir=${1:-$(dirname "$0")/env}
shift || true
peers=${*:-gloo mpi horovod}
constraints=$(cd "$(dirname "$0")/../.." && pwd)/constraints-2.15.txt

works() {
  "$1" -c 'import ensurepip, sys; sys.exit(not (3, 9) <= sys.version_info[:2] <= (3, 11))' 2>/dev/null
}
if [ -z "${PYTHON:-}" ]; then
  for PYTHON in python3.11 python3.10 python3.9 python3; do
    if works "$PYTHON"; then break; fi
  done
fi
works "$PYTHON" || {
  echo "no Python 3.9 to 3.11 with ensurepip here: say PYTHON=/path/to/python $0" >&2
  exit 1
}

# wants PEER PROGRAM PACKAGE...: each program, and the Debian package that has it
wants() {
  local peer=$1 missing=() packages=()
  shift
  while [ $# -gt 0 ]; do
    command -v "$1" >/dev/null || { missing+=("$1") && packages+=("$2"); }
    shift 2
  done
  [ ${#missing[@]} -eq 0 ] && return
  echo "$peer is left out: no ${missing[*]} here. Install with: apt-get install ${packages[*]}" >&2
  return 1
}

# creates the environment aside, so that one that is there is complete
create() {
  local peer=$1
  rm -rf "${dir:?}/$peer"
  mkdir -p "$dir"
  "$PYTHON" -m venv "$dir/$peer"
}

install_gloo() {
  create gloo
  # the wheels for CPU are smaller: PIP_INDEX_URL=https://download.pytorch.org/whl/cpu
  "$dir/gloo/bin/pip" install --quiet torch==2.13.0 numpy ml_dtypes
}

install_mpi() {
  wants mpi mpirun openmpi-bin mpicc libopenmpi-dev || return
  create mpi
  "$dir/mpi/bin/pip" install --quiet mpi4py --constraint "$constraints" numpy ml_dtypes
}

install_horovod() {
  wants horovod cmake cmake g++ g++ mpirun openmpi-bin mpicc libopenmpi-dev || return
  create horovod
  local pip="$dir/horovod/bin/pip"
  "$pip" install --quiet 'setuptools<70' wheel cffi cloudpickle psutil pyyaml packaging
  "$pip" install --quiet tensorflow==2.15.1 tensorflow-estimator==2.15.0
  HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 \
    HOROVOD_WITH_MPI=1 "$pip" install --no-build-isolation horovod==0.28.1
}

failed=0
for peer in $peers; do
  case $peer in
    gloo | mpi | horovod) ;;
    *)
      echo "no such peer: $peer (gloo, mpi, horovod)" >&2
      exit 2
      ;;
  esac
  if [ -e "$dir/$peer/.complete" ]; then
    echo "$peer: there already"
    continue
  fi
  set +e # bash ignores -e inside of a condition, so this is none
  (set -e; "install_$peer")
  code=$?
  set -e
  if [ $code -eq 0 ]; then
    touch "$dir/$peer/.complete"
    echo "$peer: installed"
  else
    failed=1
    echo "$peer: FAILED" >&2
  fi
done
if [ "$(cd "$dir" 2>/dev/null && pwd)" != "$(cd "$(dirname "$0")" && pwd)/env" ]; then
  echo "say the benchmarks where: export HOSTOPT_PEERS=$dir"
fi
exit $failed
