# Sourced by the scripts beside it: one environment, made or brought up to date when needed.
#
#   use_environment "$@"
#
# takes `--constraints FILE` (default scripts/constraints.txt) out of the arguments, leaves the
# others in the array ARGUMENTS, and sets ENVIRONMENT, PYTHON and, where it installed, INSTALLED.
# An active virtual environment is reused; otherwise .venv is made. The install runs only when
# pyproject.toml, the constraints, the interpreter or the checkout have changed since the last one.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

_fail() {
  printf 'error: %s\n' "$1" >&2
  exit 1
}

_require_python() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && return
  _fail "Python 3.10 or newer is needed, $1 is $("$1" -V 2>&1 | tail -n 1); \
activate a virtual environment made with a newer Python and run this again"
}

_find_python() {
  ENVIRONMENT=${VIRTUAL_ENV:-$ROOT/.venv}
  PYTHON=$ENVIRONMENT/bin/python
  if [[ -n ${VIRTUAL_ENV:-} ]]; then
    [[ -x $PYTHON ]] || _fail "VIRTUAL_ENV is $VIRTUAL_ENV, but it has no bin/python"
  elif ! "$PYTHON" -c '' 2>/dev/null; then
    command -v python3 >/dev/null || _fail "python3 was not found; install Python 3.10 or newer"
    _require_python python3
    echo "Making .venv"
    python3 -m venv --clear "$ENVIRONMENT" || _fail \
      "python3 -m venv failed; on Debian and Ubuntu install the package python3-venv"
  fi
  _require_python "$PYTHON"
}

# What an up-to-date environment was installed from.
_fingerprint() {
  "$PYTHON" -I - "$ROOT" "$1" <<'PY'
import hashlib, pathlib, sys
root, constraints = sys.argv[1:]
digest = hashlib.sha256()
for part in (root, sys.version):
    digest.update(part.encode() + b"\0")
for path in (pathlib.Path(root, "pyproject.toml"), pathlib.Path(constraints)):
    digest.update(path.read_bytes() + b"\0")
print(digest.hexdigest())
PY
}

# Another checkout installed into the same environment leaves our stamp in place, so look.
_is_installed_here() {
  [[ -x $ENVIRONMENT/bin/sglang ]] && "$PYTHON" -I - "$ROOT" <<'PY'
import importlib.util, pathlib, sys
spec = importlib.util.find_spec("multimodal_gen")
here = pathlib.Path(sys.argv[1], "multimodal_gen", "__init__.py").resolve()
sys.exit(spec is None or not spec.origin or pathlib.Path(spec.origin).resolve() != here)
PY
}

# Installs what the arguments of `pip install` name: with uv, which takes a fraction of pip's time;
# with pip where uv cannot be had, or fails. Modules are compiled when they are first imported.
_install() {
  _install_with_uv "$@" >/dev/null 2>&1 && return
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-compile "$@" </dev/null
}

# From the places that pip is configured to look at: uv reads no configuration of pip's.
_install_with_uv() {
  "$PYTHON" -m uv --version || "$PYTHON" -m pip install --quiet --disable-pip-version-check \
    --no-compile --constraint "$ROOT/scripts/constraints.txt" uv </dev/null || return
  local index found
  index=$(_pip_setting "${PIP_INDEX_URL:-}" index-url)
  found=$(_pip_setting "${PIP_FIND_LINKS:-}" find-links)
  UV_DEFAULT_INDEX=${index:-https://pypi.org/simple} \
    UV_INDEX=$(_pip_setting "${PIP_EXTRA_INDEX_URL:-}" extra-index-url) \
    UV_FIND_LINKS=${found// /,} \
    "$PYTHON" -m uv pip install --python "$PYTHON" --index-strategy unsafe-best-match "$@" </dev/null
}

# Prints what pip is told by the environment, $1, or else by its files, in one line.
_pip_setting() {
  local text=$1
  [[ -n $text ]] || text=$("$PYTHON" -m pip config get "global.$2" 2>/dev/null) || true
  echo $text
}

use_environment() {
  local constraints=$ROOT/scripts/constraints.txt stamp wanted
  # The tests start many processes: each would compile torch anew where nothing may be kept.
  unset PYTHONDONTWRITEBYTECODE
  INSTALLED=
  ARGUMENTS=()
  while (($#)); do
    case $1 in
      --constraints)
        (($# > 1)) || _fail "--constraints needs a file"
        constraints=$2
        shift
        ;;
      --constraints=*) constraints=${1#*=} ;;
      *) ARGUMENTS+=("$1") ;;
    esac
    shift
  done
  [[ -f $constraints ]] || _fail "--constraints must name a file, got $constraints"
  constraints=$(cd "$(dirname "$constraints")" && pwd -P)/$(basename "$constraints")
  cd "$ROOT" || exit 1
  _find_python
  stamp=$ENVIRONMENT/multimodal_gen.stamp
  wanted=$(_fingerprint "$constraints")
  if [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && _is_installed_here; then
    return
  fi
  echo "Installing multimodal_gen[video,compare,dev,docs] into $ENVIRONMENT (minutes the first time)"
  rm -f "$stamp"
  "$PYTHON" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m ensurepip >/dev/null || _fail \
    "$PYTHON has no pip; install pip into the environment and run this again"
  _install --editable "$ROOT[video,compare,dev,docs]" --constraint "$constraints" || \
    _fail "the installation failed"
  printf '%s\n' "$wanted" >"$stamp"
  INSTALLED=yes
}

# After an installation, imports once what many processes of the tests import at the same time,
# which each would compile: what all of it needs first, then the rest in two processes.
compile_imports() {
  [[ -n $INSTALLED ]] || return 0
  _import torch
  _import torch._dynamo torch._inductor.compile_fx torch.distributed.run pytest hypothesis \
    multimodal_gen.cli.main &
  _import diffusers.pipelines.wan.pipeline_wan diffusers.pipelines.flux.pipeline_flux \
    multimodal_gen.runtime.generator.run &
  wait
}

_import() {
  "$PYTHON" -c 'import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)' "$@" >/dev/null 2>&1 || true
}

# Puts the releases of scripts/triton.txt into $ENVIRONMENT/kernels, one folder each, unless the
# environment has the same one; call it after use_environment. The kernel tests that find theirs
# nowhere are skipped, so a failure is an error where CI is "true", as hosted runners set it.
install_triton() {
  local purpose release folder
  if [[ $(uname -sm) != "Linux x86_64" ]]; then
    echo "No triton is installed on $(uname -sm): kernel tests that need one are skipped"
    return
  fi
  while read -r purpose release; do
    folder=$ENVIRONMENT/kernels/triton-$release
    if [[ -z $purpose || $purpose == "#"* || -d $folder ]] || _has_triton "$release"; then
      continue
    fi
    echo "Installing triton $release into $folder, for kernel tests ($purpose)"
    ! _install_apart "triton==$release" "$folder" || continue
    [[ ${CI:-} != true ]] || _fail "the installation of triton $release failed"
    echo "That failed: kernel tests that need triton $release ($purpose) are skipped"
  done <"$ROOT/scripts/triton.txt"
}

# Puts torchao, of the release in the constraints, into $ENVIRONMENT/apart, for the tests of 8-bit
# weights; call it after use_environment. Among the packages of the environment every process that
# imports diffusers would import it too.
install_torchao() {
  local release folder
  release=$(sed -n 's/^torchao==//p' "$ROOT/scripts/constraints.txt")
  folder=$ENVIRONMENT/apart/torchao-$release
  [[ ! -d $folder ]] || return 0
  echo "Installing torchao $release into $folder, for the tests of 8-bit weights"
  ! _install_apart "torchao==$release" "$folder" || return 0
  [[ ${CI:-} != true ]] || _fail "the installation of torchao $release failed"
  echo "That failed: the tests of 8-bit weights are skipped"
}

# Installs what $1 names, without what it needs, into the folder $2, or leaves nothing.
_install_apart() {
  local partial
  mkdir -p "$(dirname "$2")"
  partial=$(mktemp -d "$(dirname "$2")/partial.XXXXXX")
  if _install --no-deps --target "$partial" "$1"; then
    chmod 755 "$partial"
    # Another run may have been faster.
    mv -T "$partial" "$2" 2>/dev/null || rm -rf "$partial"
    return 0
  fi
  rm -rf "$partial"
  return 1
}

_has_triton() {
  "$PYTHON" -I -c 'import sys; from importlib.metadata import version
sys.exit(version("triton") != sys.argv[1])' "$1" 2>/dev/null
}

# Looks for a browser, which the tests of reports look at pages with, and installs Debian's where
# root may. Without one these tests are skipped, so that is an error where CI is "true".
install_browser() {
  local name
  for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null && return
  done
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null && _is_debian; then
    echo "Installing chromium, for the tests of reports"
    if _install_chromium >/dev/null 2>&1 && command -v chromium >/dev/null; then return; fi
  fi
  [[ ${CI:-} != true ]] || _fail "the tests of reports need a browser, e.g. Debian's chromium"
  echo "There is no chromium: the tests that look at reports in a browser are skipped"
}

# Ubuntu's chromium is a snap, which containers cannot run.
_is_debian() {
  grep -qx 'ID=debian' "${OS_RELEASE:-/etc/os-release}" 2>/dev/null
}

_install_chromium() {
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core </dev/null
}
