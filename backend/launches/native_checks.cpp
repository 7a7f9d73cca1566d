// Compares what Python's objects hold with what they held, by the C interface of CPython.
//
// A guard asks a thousand such questions at each call. Each is one function of Python.h; asked here
// they cost some ten nanoseconds, where the interpreter's loop takes a hundred.

#if __has_include(<Python.h>)
#include <Python.h>

namespace {

// So many facts on is the owner fetched: after other work it is in no cache near the core.
constexpr Py_ssize_t ahead = 12;

// Calls `fact(owner, name, expected)`, which returns 1, 0, or -1 with Python's error set, for each
// three objects of a tuple until one does not return 1.
template <class Fact>
int all_of(PyObject* facts, Fact fact) {
  const Py_ssize_t count = PyTuple_GET_SIZE(facts);
  for (Py_ssize_t i = 0; i < count; i += 3) {
    if (i + 3 * ahead < count) __builtin_prefetch(PyTuple_GET_ITEM(facts, i + 3 * ahead));
    const int found = fact(PyTuple_GET_ITEM(facts, i), PyTuple_GET_ITEM(facts, i + 1),
                           PyTuple_GET_ITEM(facts, i + 2));
    if (found != 1) return found;
  }
  return 1;
}

// Whether a new reference is to this very object; without one there is an error.
int is_same(PyObject* found, PyObject* expected) {
  if (!found) return -1;
  Py_DECREF(found);  // `expected` is held by the facts
  return found == expected;
}

int holds_entry(PyObject* table, PyObject* name, PyObject* expected) {
  if (!PyDict_Check(table)) return is_same(PyObject_GetItem(table, name), expected);
  PyObject* found = PyDict_GetItemWithError(table, name);
  return found ? found == expected : PyErr_Occurred() ? -1 : 0;
}

int lacks_entry(PyObject* table, PyObject* name, PyObject*) {
  const int found =
      PyDict_Check(table) ? PyDict_Contains(table, name) : PySequence_Contains(table, name);
  return found < 0 ? -1 : !found;
}

// `expected` is a tuple of all values, in order.
int holds_values(PyObject* table, PyObject*, PyObject* expected) {
  if (!PyTuple_CheckExact(expected) || PyDict_Size(table) != PyTuple_GET_SIZE(expected)) {
    return PyErr_Occurred() ? -1 : 0;
  }
  PyObject* value;
  for (Py_ssize_t place = 0, i = 0; PyDict_Next(table, &place, nullptr, &value); ++i) {
    if (value != PyTuple_GET_ITEM(expected, i)) return 0;
  }
  return 1;
}

int has_attribute(PyObject* owner, PyObject* name, PyObject* expected) {
  return is_same(PyObject_GetAttr(owner, name), expected);
}

// Past a `__getattribute__` of the class's own.
int has_own_attribute(PyObject* owner, PyObject* name, PyObject* expected) {
  return is_same(PyObject_GenericGetAttr(owner, name), expected);
}

int is_of_class(PyObject* owner, PyObject*, PyObject* expected) {
  return reinterpret_cast<PyObject*>(Py_TYPE(owner)) == expected;
}

// hold(entries, absent, values, attributes, own_attributes, classes): whether all facts hold. What
// raises an error does not hold.
PyObject* hold(PyObject*, PyObject* const* facts, Py_ssize_t count) {
  constexpr int (*kinds[])(PyObject*, PyObject*, PyObject*) = {
      holds_entry, lacks_entry, holds_values, has_attribute, has_own_attribute, is_of_class};
  constexpr Py_ssize_t num_kinds = sizeof(kinds) / sizeof(*kinds);
  if (count != num_kinds) {
    return PyErr_Format(PyExc_TypeError, "%zd tuples are wanted, %zd were given", num_kinds, count);
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!PyTuple_CheckExact(facts[i]) || PyTuple_GET_SIZE(facts[i]) % 3) {
      return PyErr_Format(PyExc_TypeError, "facts are a flat tuple of (owner, name, expected)");
    }
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    const int found = all_of(facts[i], kinds[i]);
    if (found < 0 && !PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
    if (found < 0) PyErr_Clear();
    if (found != 1) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

}  // namespace
#endif
