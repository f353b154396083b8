// Tensors of the simulated device seen from the CPU, and the kernels shared between files.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "scheduler.h"

namespace sim {

bool is_sim(const at::Tensor& tensor);
at::Tensor cpu_alias(const at::Tensor& tensor);  // a view of device memory that does not own it
at::Tensor empty_on_device(const at::Tensor& like);
void add_access(std::vector<Access>& accesses, const at::Tensor& tensor, bool write);

// Every operator without a kernel of its own.
void queue_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sim
