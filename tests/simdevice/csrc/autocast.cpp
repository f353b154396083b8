// Mixed precision with the lists of operators that torch keeps for CUDA, as three boxed kernels.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "state.h"

namespace sim {

using at::Tensor;

namespace {

bool is_castable(const Tensor& tensor) {
  return at::autocast::is_eligible(tensor, kSim);
}

void visit_tensors(torch::jit::Stack* stack, size_t count, const std::function<Tensor(const Tensor&)>& map) {
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor() && value.toTensor().defined()) {
      value = map(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const auto& tensor : value.toTensorVector()) {
        list.push_back(map(tensor));
      }
      value = list;
    }
  }
}

void call_in(at::ScalarType dtype, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  visit_tensors(stack, op.schema().arguments().size(),
                [&](const Tensor& tensor) { return at::autocast::cached_cast(dtype, tensor, kSim); });
  op.callBoxed(stack);
}

void lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  call_in(at::autocast::get_autocast_dtype(kSim), op, stack);
}

void full_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  call_in(at::kFloat, op, stack);
}

// Reductions compute in full precision by their argument dtype=, if the caller has not set it.
void full_precision_by_dtype(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const auto& arguments = op.schema().arguments();
  size_t first = stack->size() - arguments.size();
  if ((*stack)[first].isTensor() && is_castable((*stack)[first].toTensor())) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() == "dtype" && (*stack)[first + i].isNone()) {
        (*stack)[first + i] = at::kFloat;
      }
    }
  }
  op.callBoxed(stack);
}

void widest_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto dtype = at::autocast::get_autocast_dtype(kSim);
  visit_tensors(stack, op.schema().arguments().size(), [&](const Tensor& tensor) {
    dtype = at::autocast::prioritize(dtype, tensor, kSim);
    return tensor;
  });
  call_in(dtype, op, stack);
}

}  // namespace

}  // namespace sim

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// torch's lists name an operator as (name) or as (name, overload).
#define SIM_NAME_1(name) #name
#define SIM_NAME_2(name, overload) #name "." #overload
#define SIM_CHOOSE(first, second, chosen, ...) chosen
#define SIM_NAME(...) SIM_CHOOSE(__VA_ARGS__, SIM_NAME_2, SIM_NAME_1)(__VA_ARGS__)
#define SIM_KERNEL(kernel, ...) m.impl(SIM_NAME(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&kernel>());
#define SIM_LOWER(...) SIM_KERNEL(sim::lower_precision, __VA_ARGS__)
#define SIM_FULL(...) SIM_KERNEL(sim::full_precision, __VA_ARGS__)
#define SIM_DTYPE(...) SIM_KERNEL(sim::full_precision_by_dtype, __VA_ARGS__)
#define SIM_WIDEST(...) SIM_KERNEL(sim::widest_precision, __VA_ARGS__)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_DTYPE)
  AT_FORALL_PROMOTE(SIM_WIDEST)
}
