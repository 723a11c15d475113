#!/bin/sh
# Print a Python that can make virtual environments: the first suitable one from 3.10 to 3.13, or `python.sh 3.12`.
set -eu

candidates="python3 python3.13 python3.12 python3.11 python3.10"
if [ $# -gt 0 ]; then candidates="python$1 ${PYENV_ROOT:-$HOME/.pyenv}/versions/$1.*/bin/python"; fi
for python in $candidates; do
    if "$python" -c 'import sys, venv, ensurepip; raise SystemExit(not (3, 10) <= sys.version_info < (3, 14))' \
        >/dev/null 2>&1; then
        echo "$python"
        exit 0
    fi
done
echo "No Python ${1:-from 3.10 to 3.13} with venv was found on the PATH. Install one (on Debian and Ubuntu: sudo apt-get" \
    "install python3-venv), or name yours: make setup PYTHON=/path/to/python3.12" >&2
exit 1
