#!/usr/bin/env bash
# tests/dist/dist.sh PYTHON makes dist/: the sdist, and from it the CPU wheel, built as pip does, without torch. It checks their
# descriptions and contents, and runs operators from the wheel in a fresh environment, away from the sources.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(realpath -s "$1")
export MAXRL_FAST_CUDA=OFF PIP_CONSTRAINT=$PWD/constraints.txt
rm -rf dist build/fresh
"$python" -m build
"$python" -m twine check --strict dist/*
"$python" tests/dist/check_dist.py dist
"$python" -m venv build/fresh
build/fresh/bin/pip install --disable-pip-version-check -q dist/*.whl
cp tests/dist/try_wheel.py build/fresh/
cd build/fresh
env -u PYTHONPATH bin/python try_wheel.py
