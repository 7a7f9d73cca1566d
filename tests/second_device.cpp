#include <torch/library.h>
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace {
constexpr auto kHere = c10::DeviceType::PrivateUse1;
int64_t copies = 0;
struct Allocator final : at::Allocator {
  at::DataPtr allocate(size_t n) override {
    void* p = n ? std::malloc(n) : nullptr;
    return {p, p, &std::free, at::Device(kHere, 0)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* d, const void* s, std::size_t n) const override { std::memcpy(d, s, n); }
};
Allocator allocator;
REGISTER_ALLOCATOR(kHere, &allocator);
struct Guard final : c10::impl::NoOpDeviceGuardImpl<kHere> {
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, c10::Device(kHere, 0)); }
  c10::Device exchangeDevice(c10::Device) const override { return {kHere, 0}; }
  c10::Device getDevice() const override { return {kHere, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
};
Hooks hooks;

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> f) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), f);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
// A tensor of the CPU over the same bytes.
at::Tensor bytes_of(const at::Tensor& t) {
  if (!t.is_privateuseone()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [t](void*) {}, at::TensorOptions().dtype(t.scalar_type()), at::kCPU);
}
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool) {
  ++copies;
  bytes_of(dst).copy_(bytes_of(self));
  return dst;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  at::native::resize_(dst, self.sizes(), std::nullopt);
  return copy_from(self, dst, false);
}
at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef a, c10::SymIntArrayRef b, std::optional<c10::SymInt> o) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(a), C10_AS_INTARRAYREF_SLOW(b), o ? std::optional<int64_t>(o->expect_int()) : std::nullopt);
}
const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef a, std::optional<at::MemoryFormat> f) { return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(a), f); }
at::Scalar local(const at::Tensor& self) { return bytes_of(self).item(); }
at::Tensor& set_storage(at::Tensor& r, at::Storage s, c10::SymInt o, c10::SymIntArrayRef a, c10::SymIntArrayRef b) {
  return at::native::set_storage_cpu_(r, s, o.expect_int(), C10_AS_INTARRAYREF_SLOW(a), C10_AS_INTARRAYREF_SLOW(b));
}
at::Tensor& set_whole_storage(at::Tensor& r, at::Storage s) {
  int64_t size = s.nbytes() / r.itemsize();
  return at::native::set_storage_cpu_(r, s, 0, {size}, {1});
}
at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef a) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(a)); }
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("as_strided", &as_strided);
  m.impl("resize_", &resize_);
  m.impl("_local_scalar_dense", &local);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("view", &view);
}
TORCH_LIBRARY(second_device, m) {
  m.def("num_copies", [] { return copies; });
  m.def("set_hooks", [] { at::RegisterPrivateUse1HooksInterface(&hooks); });
}
