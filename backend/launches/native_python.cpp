// What Python calls, as an extension module: a step's few calls then cost a microsecond each where
// ctypes, whose code is cold by then, takes ten. Where Python's headers are missing there is none,
// and the functions are called through ctypes.

#if __has_include(<Python.h>)
#include <Python.h>

namespace {

// Reads `wanted` addresses and counts; false with Python's error set if they are something else.
bool read_numbers(PyObject* const* given, Py_ssize_t count, Py_ssize_t wanted, int64_t* numbers) {
  if (count != wanted) {
    PyErr_Format(PyExc_TypeError, "%zd numbers are wanted, %zd were given", wanted, count);
    return false;
  }
  for (Py_ssize_t i = 0; i < wanted; ++i) {
    numbers[i] = PyLong_AsLongLong(given[i]);
    if (numbers[i] == -1 && PyErr_Occurred()) return false;
  }
  return true;
}

template <class T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(address);
}

// A loop may not end, so it asks; a handler's exception is then this thread's.
bool has_signal() {
  const PyGILState_STATE state = PyGILState_Ensure();
  const bool found = PyErr_CheckSignals() != 0;
  PyGILState_Release(state);
  return found;
}

PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t count) {
  int64_t n[3];
  if (!read_numbers(given, count, 3, n)) return nullptr;
  int failure;
  Py_BEGIN_ALLOW_THREADS
  failure = lazyinline_run(at<word>(n[0]), n[1], at<char*>(n[2]));
  Py_END_ALLOW_THREADS
  if (failure == OTHER && !PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, reason.c_str());
  return PyErr_Occurred() ? nullptr : PyLong_FromLong(failure);
}

PyObject* move(PyObject*, PyObject* const* given, Py_ssize_t count) {
  int64_t n[3];
  if (!read_numbers(given, count, 3, n)) return nullptr;
  std::memmove(at<void>(n[0]), at<void>(n[1]), n[2]);
  Py_RETURN_NONE;
}

template <class Function>
PyMethodDef method(const char* name, Function function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), METH_FASTCALL,
          nullptr};
}

PyMethodDef methods[] = {method("run", run), method("hold", hold), method("move", move), {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "lazyinline_native", nullptr, 0, methods};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_lazyinline_native() {
  interrupted = has_signal;
  return PyModule_Create(&module);
}
#endif
