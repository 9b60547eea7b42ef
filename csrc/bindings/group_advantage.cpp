// Group advantages of full groups on a CPU by positional arguments: to read keywords takes longer
// than the work.
#include "../group_advantage.h"

#include <pybind11/pybind11.h>

namespace maxrl::bindings {
namespace {

// (group_size, table, centred, scale, eps, ddof, num_groups, rewards, advantages, num_threads),
// where the table's address may be 0; returns whether all advantages are finite.
template <typename Real>
PyObject* full_groups(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 10)
    return PyErr_Format(PyExc_TypeError, "full_groups takes 10 arguments, got %zd", count);
  const auto integer = [given](int i) { return PyLong_AsLongLong(given[i]); };
  GroupAdvantage<Real> in{};
  in.group_size = integer(0);
  in.tables = reinterpret_cast<const double*>(integer(1));
  in.centred = integer(2) != 0;
  in.scale = static_cast<Scale>(integer(3));
  in.eps = PyFloat_AsDouble(given[4]);
  in.ddof = integer(5);
  in.num_groups = integer(6);
  in.rewards = reinterpret_cast<const Real*>(integer(7));
  in.advantages = reinterpret_cast<Real*>(integer(8));
  const int num_threads = static_cast<int>(integer(9));
  if (PyErr_Occurred()) return nullptr;
  int64_t are_finite;
  Py_BEGIN_ALLOW_THREADS are_finite = cpu::group_advantage(in, num_threads);
  Py_END_ALLOW_THREADS return PyBool_FromLong(are_finite);
}

PyMethodDef methods[] = {
    {"full_groups_float32", (PyCFunction)(void (*)())full_groups<float>, METH_FASTCALL, ""},
    {"full_groups_float64", (PyCFunction)(void (*)())full_groups<double>, METH_FASTCALL, ""},
    {}};

}  // namespace

void bind_group_advantage(pybind11::module_& m) { PyModule_AddFunctions(m.ptr(), methods); }

}  // namespace maxrl::bindings
