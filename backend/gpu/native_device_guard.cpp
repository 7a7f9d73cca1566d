// A PyTorch that was built without CUDA cannot tell which device of it is the present one, and asks
// even of tensors that hold nothing. There is none, so nothing has to be switched.

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
}
