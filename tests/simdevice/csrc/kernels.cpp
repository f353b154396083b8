// Operators with a kernel of their own: factories, views, copies, and what torch decomposes for other devices.
#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>

#include <cstring>

#include "memory.h"
#include "operators.h"

namespace sim {

using at::Tensor;

namespace {

// ---------------------------------------------------------------- factories

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "only tensors of the CPU can be pinned");
  return at::detail::empty_generic(size, &device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "only tensors of the CPU can be pinned");
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

// ---------------------------------------------------------------- views

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  auto concrete_offset = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           concrete_offset);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

// ---------------------------------------------------------------- storages

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  size_t needed = at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), self.storage_offset());
  if (needed > self.storage().nbytes()) {
    resize_storage(self.storage(), needed);
  }
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

Tensor& set_storage_at(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                       c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, storage, offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  }
  // torch would grow the storage, and move it away from its other users; that is hardly ever meant.
  size_t end = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), offset);
  TORCH_CHECK(self.numel() == 0 || end <= self.storage().nbytes(), "sim: set_ reaches byte ", end,
              " of a storage of ", self.storage().nbytes());
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage) {
  int64_t count = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage_at(self, std::move(storage), 0, {count}, {});
}

Tensor& set_nothing(Tensor& self) {
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, device_allocator().allocate(0),
                                        &device_allocator(), true));
}

void record_stream(Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

// ---------------------------------------------------------------- copies

// Does the copy engine copy it as it is?  Else torch goes through a temporary tensor in pageable memory.
bool is_plain(const Tensor& host, const Tensor& device, const Tensor& target) {
  bool same_layout = host.sizes() == device.sizes() && host.strides() == device.strides() &&
                     host.is_non_overlapping_and_dense() && host.scalar_type() == device.scalar_type();
  return same_layout || host.expand(target.sizes()).is_contiguous();
}

void poison(const Tensor& host) {
  if (host.scalar_type() == at::kBool) {
    std::memset(host.data_ptr(), 1, host.numel());
  } else {
    std::memset(host.data_ptr(), kPoison, host.nbytes());
  }
}

void count_copy(Direction direction, size_t bytes, bool pageable) {
  std::string suffix = direction == Direction::out ? "_out" : "_in";
  state().counts["bytes" + suffix] += static_cast<int64_t>(bytes);
  ++state().counts["copies" + suffix];
  if (pageable) {
    ++state().counts["pageable_copies" + suffix];
  }
}

Tensor copy_on_device(const Tensor& source, const Tensor& target) {
  std::vector<Access> accesses;
  add_access(accesses, source, false);
  add_access(accesses, target, true);
  auto closure = [from = cpu_alias(source), to = cpu_alias(target)] { to.copy_(from); };
  submit(current_stream(), "copy_D2D", closure, accesses, operator_cost(0, source.nbytes() + target.nbytes()));
  return target;
}

Tensor copy_in(const Tensor& source, const Tensor& target, bool non_blocking) {
  auto* block = find_block(source.const_data_ptr());
  bool pinned = block && block->pinned && is_plain(source, target, target);
  std::vector<Access> accesses;
  Tensor from;
  if (pinned) {
    add_access(accesses, source, false);
    from = cpu_alias(source);
  } else {
    if (block) {  // staged by the host, now
      std::vector<Access> read;
      add_access(read, source, false);
      log_host_access(read[0], "staging a copy");
    }
    from = source.clone();
    if (non_blocking) {
      ++state().counts["pageable_nonblocking_h2d"];
    }
  }
  add_access(accesses, target, true);
  // A conversion happens on the device if the copy does not block, and on the host if it does.
  size_t bytes = source.numel() * (non_blocking ? source.itemsize() : target.itemsize());
  count_copy(Direction::in, bytes, !pinned);
  auto& stream = state().streams[current_stream()];
  auto closure = [from, to = cpu_alias(target)] { to.copy_(from); };
  submit(current_stream(), "copy_H2D", closure, accesses, copy_cost(Direction::in, bytes, !pinned));
  if (!non_blocking) {
    host_waits_for_stream(current_stream());
  } else if (!pinned) {
    clock_host_waits(stream.time);  // in time; what the host may rely on is only that the source has been read
  }
  return target;
}

Tensor copy_out(const Tensor& source, const Tensor& target, bool non_blocking) {
  auto* block = find_block(target.const_data_ptr());
  bool pinned = block && block->pinned && is_plain(target, source, target);
  if (!pinned && non_blocking) {
    ++state().counts["pageable_nonblocking_d2h"];
    non_blocking = false;
  }
  std::vector<Access> accesses;
  add_access(accesses, source, false);
  add_access(accesses, target, true);
  auto to = cpu_alias(target);
  bool unused = !block || target.numel() == 0 || !is_pending(accesses.back());
  if (non_blocking && state().poison && unused) {
    poison(to);  // its contents are undefined until the copy has been waited for
  }
  size_t bytes = target.numel() * (non_blocking ? target.itemsize() : source.itemsize());
  count_copy(Direction::out, bytes, !pinned);
  auto closure = [from = cpu_alias(source), to] { to.copy_(from); };
  submit(current_stream(), "copy_D2H", closure, accesses, copy_cost(Direction::out, bytes, !pinned));
  if (!non_blocking) {
    host_waits_for_stream(current_stream());
  }
  return target;
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView guard;
  Lock lock;
  if (target.numel() > 0) {
    if (is_sim(source) && is_sim(target)) {
      copy_on_device(source, target);
    } else if (is_sim(target)) {
      copy_in(source, target, non_blocking);
    } else {
      copy_out(source, target, non_blocking);
    }
  }
  advance();
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) {
    target.resize_(source.sizes());
  }
  return copy_from(source, target, false);
}

at::Scalar item(const Tensor& self) {
  {
    Lock lock;
    std::vector<Access> accesses;
    add_access(accesses, self, false);
    submit(current_stream(), "item", nullptr, accesses);
    host_waits_for_stream(current_stream());
  }
  return cpu_alias(self).item();
}

// ---------------------------------------------------------------- composites

int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return static_cast<int64_t>(at::SDPBackend::math);
}

// The mask is drawn at the call, as every random number.
std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool> train) {
  at::AutoDispatchBelowADInplaceOrView guard;
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true) || p == 0) {
    mask.fill_(true);
    return {input.clone(), mask};
  }
  mask.bernoulli_(1 - p);
  double scale = p == 1 ? 0 : 1 / (1 - p);
  return {input.mul(mask).mul_(scale), mask};
}

// Cells of recurrent layers, of which the CPU has no fused kernels. Composed of operators that have derivatives.
Tensor with_bias(const Tensor& gates, const std::optional<Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell,
                                             const std::optional<Tensor>& input_bias,
                                             const std::optional<Tensor>& hidden_bias) {
  auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  auto new_cell = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh();
  auto new_hidden = gates[3].sigmoid() * new_cell.tanh();
  return {new_hidden, new_cell, at::empty({0}, cell.options())};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hidden,
                                    const std::optional<Tensor>& input_bias,
                                    const std::optional<Tensor>& hidden_bias) {
  auto of_input = with_bias(input_gates, input_bias).chunk(3, 1);
  auto of_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  auto reset = (of_input[0] + of_hidden[0]).sigmoid();
  auto update = (of_input[1] + of_hidden[1]).sigmoid();
  auto candidate = (of_input[2] + reset * of_hidden[2]).tanh();
  return {(hidden - candidate) * update + candidate, at::empty({0}, hidden.options())};
}

c10::OperatorHandle find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static auto op = find_operator("aten::convolution");
  queue_operator(op, stack);
}

// aten::convolution_backward wants the sizes of the bias as its fourth argument.
void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static auto op = find_operator("aten::convolution_backward");
  constexpr size_t kCount = 10;
  constexpr size_t kWeight = 2;
  constexpr size_t kTransposed = 6;
  constexpr size_t kGroups = 8;
  auto arguments = torch::jit::pop(*stack, kCount);
  const auto& weight = arguments[kWeight].toTensor();
  bool transposed = arguments[kTransposed].toBool();
  int64_t channels = transposed ? weight.size(1) * arguments[kGroups].toInt() : weight.size(0);
  for (size_t i = 0; i < kCount; ++i) {
    stack->push_back(arguments[i]);
    if (i == kWeight) {
      stack->emplace_back(std::vector<int64_t>{channels});
    }
  }
  queue_operator(op, stack);
}

}  // namespace

}  // namespace sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // Factories
  m.impl("empty.memory_format", sim::empty);
  m.impl("empty_strided", sim::empty_strided);
  // Views
  m.impl("as_strided", sim::as_strided);
  m.impl("view", sim::view);
  m.impl("_reshape_alias", sim::reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  // Storages
  m.impl("resize_", sim::resize);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", sim::set_storage);
  m.impl("set_.source_Storage_storage_offset", sim::set_storage_at);
  m.impl("set_", sim::set_nothing);
  m.impl("is_set_to", at::native::is_set_to);
  m.impl("record_stream", sim::record_stream);
  // Copies
  m.impl("_copy_from", sim::copy_from);
  m.impl("_copy_from_and_resize", sim::copy_from_and_resize);
  m.impl("_local_scalar_dense", sim::item);
  // Composites that torch would decompose into operators without a derivative, or into needlessly many
  m.impl("_fused_sdp_choice", sim::choose_attention);
  m.impl("native_dropout", sim::dropout);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&sim::convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&sim::convolution_backward>());
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&sim::queue_operator>());
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&sim::queue_operator>());
  m.impl("_thnn_fused_lstm_cell", sim::lstm_cell);
  m.impl("_thnn_fused_gru_cell", sim::gru_cell);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", sim::lstm_cell);
  m.impl("_thnn_fused_gru_cell", sim::gru_cell);
}

// A copy resolves lazy conjugation and negation itself; torch would resolve them with another copy, and so on.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
