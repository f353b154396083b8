// Floating point operations of the operators where the count is easy and exact, as torch.utils.flop_counter has it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <string>
#include <vector>

namespace sim {

constexpr double kPerMultiplyAdd = 2;

inline double product(c10::IntArrayRef sizes) {
  double result = 1;
  for (auto size : sizes) {
    result *= static_cast<double>(size);
  }
  return result;
}

// [..., m, k] times [..., k, n]
inline double matmul(const c10::IValue& left, const c10::IValue& right) {
  return kPerMultiplyAdd * product(left.toTensor().sizes()) * static_cast<double>(right.toTensor().size(-1));
}

// Every weight meets every position of the output, or of the input when the convolution is transposed.
inline double convolution(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& output,
                          bool transposed) {
  auto positions = (transposed ? input : output).sizes();
  return kPerMultiplyAdd * static_cast<double>(positions[0]) * product(positions.slice(2)) * product(weight.sizes());
}

inline double flops(const std::string& name, const torch::jit::Stack& arguments,
                    const std::vector<c10::IValue>& results) {
  if (name == "aten::mm" || name == "aten::bmm") {
    return matmul(arguments[0], arguments[1]);
  }
  if (name == "aten::addmm" || name == "aten::baddbmm" || name == "aten::_addmm_activation") {
    return matmul(arguments[1], arguments[2]);
  }
  if (name == "aten::convolution") {
    constexpr size_t kTransposed = 6;
    return convolution(arguments[0].toTensor(), arguments[1].toTensor(), results[0].toTensor(),
                       arguments[kTransposed].toBool());
  }
  if (name == "aten::convolution_backward") {
    constexpr size_t kTransposed = 7;
    constexpr size_t kMask = 10;
    auto wanted = arguments[kMask].toBoolList();
    double each = convolution(arguments[1].toTensor(), arguments[2].toTensor(), arguments[0].toTensor(),
                              arguments[kTransposed].toBool());
    return each * (static_cast<double>(wanted[0]) + static_cast<double>(wanted[1]));
  }
  return 0;
}

}  // namespace sim
