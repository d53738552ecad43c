# Sourced by the scripts of this folder: the repository's root, and how they talk and fail.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
log="$root/.cache/setup.log"

say() { printf '%s\n' "$*" >&2; }

fail() {
  say "$(basename "$0"): $*"
  exit 1
}

# step LABEL COMMAND...: runs the command into the log; one line on the screen: the label and its seconds.
step() {
  local label=$1 begin=$SECONDS status=0
  shift
  printf '  %-44s' "$label" >&2
  printf '\n== %s: %s\n' "$label" "$*" >>"$log"
  "$@" >>"$log" 2>&1 </dev/null || status=$?
  if ((status)); then
    say " failed. The end of $log:"
    tail -n 15 "$log" | sed 's/^/    /' >&2
    return "$status"
  fi
  printf '%5d s\n' $((SECONDS - begin)) >&2
}

is_root() { [ "$(id -u)" -eq 0 ]; }

# can_install: whether Debian packages can be had without asking anybody.
can_install() { is_root && command -v apt-get >/dev/null; }

install_debian() {
  export DEBIAN_FRONTEND=noninteractive
  [ -n "${has_lists:-}" ] || step "package lists" apt-get -o DPkg::Lock::Timeout=120 update
  has_lists=1
  step "Debian packages: $*" apt-get -o DPkg::Lock::Timeout=120 install -y --no-install-recommends "$@"
}
