# Sourced by emulate.sh and sanitize.sh: `build_tree PYTHON NAME CMAKE_OPTION...` builds the extension with these options into a copy
# of the package and the tests under build/NAME, sets python, build and tree, and changes to that copy. Needs cmake, ninja and
# PYTHON's pybind11.
build_tree() {
  python=$(realpath -s "$1")
  build=$PWD/build/$2
  tree=$build/tree
  shift 2
  cmake -S . -B "$build/cmake" -G Ninja "$@" -DPython_EXECUTABLE="$python" \
    -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$tree/maxrl_fast"
  cmake --build "$build/cmake"
  find "$tree" -type f ! -path "$tree/maxrl_fast/_C*.so" -delete
  tar --exclude='*.so' --exclude=__pycache__ -cf - csrc maxrl_fast tests examples pyproject.toml | tar -xf - -C "$tree"
  cd "$tree"  # its package comes before the installed one
}
