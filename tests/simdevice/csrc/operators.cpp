// Operators without a kernel of their own: infer the results with the Meta kernel, allocate them, queue the CPU kernel.
#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <unordered_map>

#include "call_key.h"
#include "flops.h"
#include "memory.h"

namespace sim {

using at::Tensor;
using c10::IValue;

// ---------------------------------------------------------------- tensors

bool is_sim(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

Tensor cpu_alias(const Tensor& tensor) {
  size_t end = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                                tensor.storage_offset());
  TORCH_CHECK(tensor.numel() == 0 || end <= tensor.storage().nbytes(), "sim: a tensor of ", end,
              " bytes reaches past the end of its storage of ", tensor.storage().nbytes());
  auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  auto alias = at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

Tensor empty_on_device(const Tensor& like) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(c10::Device(kSim, 0)));
}

void add_access(std::vector<Access>& accesses, const Tensor& tensor, bool write) {
  if (!tensor.defined() || tensor.numel() == 0) {
    return;
  }
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  auto* block = find_block(data);
  if (!block) {
    TORCH_CHECK(!is_sim(tensor), "sim: a tensor has no memory; its storage has ", tensor.storage().nbytes(), " bytes");
    return;
  }
  size_t begin = data - block->data;
  size_t size = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  accesses.push_back({block, begin, begin + size, write});
}

namespace {

// ---------------------------------------------------------------- arguments

using TensorMap = std::function<Tensor(const Tensor&, bool written)>;

// The argument with every tensor and every device replaced.
IValue convert(const IValue& value, bool written, const TensorMap& map, c10::Device device) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(map(value.toTensor(), written)) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const auto& tensor : value.toTensorVector()) {
      list.push_back(tensor.defined() ? map(tensor, written) : tensor);
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      bool defined = tensor.has_value() && tensor->defined();
      list.push_back(defined ? std::optional<Tensor>(map(*tensor, written)) : std::nullopt);
    }
    return list;
  }
  return value.isDevice() ? IValue(device) : value;
}

// Arguments that an operator writes although its schema does not say so.
bool writes_secretly(const std::string& name, size_t argument, const torch::jit::Stack& arguments) {
  if (name == "aten::native_batch_norm") {
    constexpr size_t kRunningMean = 3;
    constexpr size_t kRunningVar = 4;
    constexpr size_t kTraining = 5;
    return (argument == kRunningMean || argument == kRunningVar) && arguments[kTraining].toBool();
  }
  if (name == "aten::batch_norm_update_stats") {
    return argument == 1 || argument == 2;
  }
  return false;
}

// Means and deviations of normalizations are what the CPU's backward wants, not what the Meta kernel says.
std::optional<at::ScalarType> type_of_statistics(const std::string& name, const torch::jit::Stack& arguments) {
  static const std::map<std::string, std::vector<size_t>> by_argument{
      {"aten::native_layer_norm", {2, 0}},
      {"aten::native_group_norm", {1, 0}},
      {"aten::native_batch_norm", {1, 3, 0}},
  };
  auto found = by_argument.find(name);
  if (found == by_argument.end()) {
    return std::nullopt;
  }
  for (size_t argument : found->second) {
    if (arguments[argument].isTensor() && arguments[argument].toTensor().defined()) {
      return arguments[argument].toTensor().scalar_type();
    }
  }
  return std::nullopt;
}

// A copy of the host's tensor: closures must never own a tensor that Python sees, its release would need the GIL.
Tensor private_copy(const Tensor& tensor) {
  auto copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

bool is_tensor_or_tensors(const c10::TypePtr& type) {
  if (const auto* list = type->castRaw<c10::ListType>()) {
    return list->getElementType()->kind() == c10::TypeKind::TensorType;
  }
  return type->kind() == c10::TypeKind::TensorType;
}

// ---------------------------------------------------------------- one call of an operator

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), name_(schema_.name()), stack_(stack) {
    size_t count = schema_.arguments().size();
    arguments_.assign(stack->end() - static_cast<int64_t>(count), stack->end());
    for (size_t i = 0; i < count; ++i) {
      const auto* alias = schema_.arguments()[i].alias_info();
      written_.push_back((alias && alias->isWrite()) || writes_secretly(name_, i, arguments_));
    }
    for_each_tensor([&](const Tensor& tensor, bool written) {
      if (is_sim(tensor)) {
        operands_.push_back({tensor, written});
      }
    });
  }

  void run() {
    bool random = op_.hasTag(at::Tag::nondeterministic_seeded);
    if (random && draws_only()) {
      draw();
    } else if (!random && infer()) {
      queue();
    } else {
      run_now();
    }
    torch::jit::drop(*stack_, arguments_.size());
    for (auto& result : results_) {
      stack_->push_back(std::move(result));
    }
    Lock lock;
    advance();
  }

 private:
  struct Operand {
    Tensor tensor;
    bool written;
  };

  void for_each_tensor(const std::function<void(const Tensor&, bool)>& visit) {
    auto map = [&](const Tensor& tensor, bool written) {
      visit(tensor, written);
      return tensor;
    };
    for (size_t i = 0; i < arguments_.size(); ++i) {
      convert(arguments_[i], written_[i], map, c10::kCPU);
    }
  }

  torch::jit::Stack converted(const TensorMap& map, c10::Device device) {
    torch::jit::Stack stack;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      stack.push_back(convert(arguments_[i], written_[i], map, device));
    }
    return stack;
  }

  torch::jit::Stack on_cpu() {
    auto map = [](const Tensor& tensor, bool) { return is_sim(tensor) ? cpu_alias(tensor) : private_copy(tensor); };
    return converted(map, c10::kCPU);
  }

  std::vector<Access> accesses() {
    std::vector<Access> accesses;
    for (const auto& operand : operands_) {
      add_access(accesses, operand.tensor, operand.written);
    }
    for (const auto& tensor : fresh_) {
      add_access(accesses, tensor, true);
    }
    return accesses;
  }

  Cost cost(const std::vector<Access>& accesses) {
    if (!state().clock.on) {
      return {};
    }
    size_t bytes = 0;
    for (const auto& access : accesses) {
      bytes += access.end - access.begin;
    }
    return operator_cost(flops(name_, arguments_, results_), bytes);
  }

  // The argument that a result is an alias of: in-place and out= operators return what they wrote.
  const IValue* aliased(size_t result) {
    const auto* alias = schema_.returns()[result].alias_info();
    if (!alias) {
      return nullptr;
    }
    TORCH_CHECK(alias->isWrite(), "sim: the view operator ", name_, " has no kernel");
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto* other = schema_.arguments()[i].alias_info();
      if (other && *other == *alias) {
        return &arguments_[i];
      }
    }
    return nullptr;
  }

  IValue new_result(const IValue& like, const std::function<Tensor(const Tensor&)>& make) {
    if (like.isTensor()) {
      return like.toTensor().defined() ? make(like.toTensor()) : like;
    }
    c10::List<Tensor> list;
    for (const auto& tensor : like.toTensorVector()) {
      list.push_back(tensor.defined() ? make(tensor) : tensor);
    }
    return list;
  }

  // ---------------------------------------------------------------- queued operators

  // Allocates the results; false if their shapes are only known once the operator has run.
  bool infer() {
    if (!may_infer()) {
      return false;
    }
    const auto& inference = find_inference();
    if (!inference.known) {
      return false;
    }
    size_t next = 0;
    for (const auto& operand : operands_) {
      if (operand.written) {
        const auto& size = inference.written_sizes[next++];
        if (operand.tensor.sizes() != size) {
          operand.tensor.resize_(size);
        }
      }
    }
    for (size_t i = 0; i < inference.results.size(); ++i) {
      if (const auto* alias = aliased(i)) {
        results_.push_back(*alias);
        continue;
      }
      results_.push_back(new_result(inference.results[i], [&](const Tensor& meta) {
        fresh_.push_back(empty_on_device(meta));
        return fresh_.back();
      }));
    }
    return true;
  }

  bool may_infer() {
    if (op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output)) {
      return false;
    }
    for (const auto& result : schema_.returns()) {
      if (!is_tensor_or_tensors(result.type())) {
        return false;
      }
    }
    for (const auto& argument : arguments_) {
      if (argument.isOptionalTensorList() && has_mask(argument)) {
        return false;
      }
    }
    return true;
  }

  // What the Meta kernel says about the call: sizes of what it writes, and results without data.
  struct Inference {
    bool known = false;  // false: no Meta kernel, or wrong arguments, as the CPU kernel will say
    std::vector<std::vector<int64_t>> written_sizes;
    std::vector<IValue> results;
  };

  // Remembered, since many Meta kernels are written in Python and slow.
  const Inference& find_inference() {
    static auto* known = new std::unordered_map<std::string, Inference>;
    auto key = CallKey::of(schema_, arguments_);
    if (!key) {
      inference_ = ask_meta_kernel();
      return inference_;
    }
    {
      Lock lock;
      auto found = known->find(*key);
      if (found != known->end()) {
        return found->second;
      }
    }
    auto inference = ask_meta_kernel();
    Lock lock;
    return known->emplace(std::move(*key), std::move(inference)).first->second;
  }

  Inference ask_meta_kernel() {
    Inference inference;
    std::vector<Tensor> written;
    auto to_meta = [&](const Tensor& tensor, bool is_written) {
      if (!is_sim(tensor)) {
        return tensor;
      }
      auto meta = empty_meta(tensor);
      if (is_written) {
        written.push_back(meta);
      }
      return meta;
    };
    auto stack = converted(to_meta, c10::kMeta);
    try {
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    } catch (const std::exception&) {
      return inference;
    }
    for (const auto& meta : written) {
      inference.written_sizes.push_back(meta.sizes().vec());
    }
    size_t count = schema_.returns().size();
    for (size_t i = 0; i < count; ++i) {
      const auto statistics = i > 0 ? type_of_statistics(name_, arguments_) : std::nullopt;
      inference.results.push_back(new_result(stack[stack.size() - count + i], [&](const Tensor& result) {
        // A tensor of our own: those of a kernel in Python belong to Python.
        auto meta = empty_meta(result);
        return statistics ? meta.to(*statistics) : meta;
      }));
    }
    inference.known = true;
    return inference;
  }

  static Tensor empty_meta(const Tensor& like) {
    return at::empty_strided(like.sizes(), like.strides(), like.options().device(c10::kMeta));
  }

  static bool has_mask(const IValue& indices) {
    for (const auto& index : indices.toOptionalTensorVector()) {
      if (index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte)) {
        return true;
      }
    }
    return false;
  }

  void queue() {
    std::vector<Tensor> targets;
    for (const auto& tensor : fresh_) {
      targets.push_back(cpu_alias(tensor));
    }
    std::vector<bool> is_fresh;
    for (const auto& result : schema_.returns()) {
      is_fresh.push_back(result.alias_info() == nullptr);
    }
    auto closure = [op = op_, stack = on_cpu(), targets, is_fresh]() mutable {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      size_t next = 0;
      auto store = [&](const Tensor& result) {
        if (result.defined() && next < targets.size()) {
          targets[next++].copy_(result);
        }
      };
      for (size_t i = 0; i < is_fresh.size(); ++i) {
        const auto& result = stack[stack.size() - is_fresh.size() + i];
        if (!is_fresh[i]) {
          continue;
        }
        if (result.isTensor()) {
          store(result.toTensor());
        } else {
          for (const auto& tensor : result.toTensorVector()) {
            store(tensor);
          }
        }
      }
    };
    Lock lock;
    auto touched = accesses();
    submit(current_stream(), name_, std::move(closure), touched, cost(touched));
  }

  // ---------------------------------------------------------------- random numbers

  // Does the operator fill its operands without reading them?
  bool draws_only() {
    bool reads = name_.find("rrelu") != std::string::npos;
    for (const auto& operand : operands_) {
      reads |= !operand.written;
    }
    return !reads && !operands_.empty();
  }

  // The numbers are drawn at the call, from the CPU's generator in the order of the program, and stored when the
  // stream gets there: the host does not wait, and every schedule gives the same numbers as the CPU.
  void draw() {
    std::vector<std::pair<Tensor, Tensor>> drawn;
    auto stage = [&](const Tensor& tensor, bool) {
      if (!is_sim(tensor)) {
        return tensor;
      }
      // With the same strides, since the order of the numbers depends on them.
      auto staged = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
      drawn.emplace_back(tensor, staged);
      return staged;
    };
    auto stack = converted(stage, c10::kCPU);
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    std::vector<std::pair<Tensor, Tensor>> stores;
    for (auto& [tensor, staged] : drawn) {
      if (tensor.sizes() != staged.sizes()) {
        tensor.resize_(staged.sizes());
      }
      stores.emplace_back(cpu_alias(tensor), staged);
    }
    for (size_t i = 0; i < schema_.returns().size(); ++i) {
      results_.push_back(*aliased(i));
    }
    auto closure = [stores]() {
      for (const auto& [target, staged] : stores) {
        target.copy_(staged);
      }
    };
    Lock lock;
    auto touched = accesses();
    submit(current_stream(), name_, closure, touched, cost(touched));
  }

  // ---------------------------------------------------------------- operators that need the host

  void run_now() {
    Lock lock;
    ++state().counts["sync:" + name_];
    StreamId id = current_stream();
    auto touched = accesses();
    submit(id, name_, nullptr, touched, cost(touched));
    host_waits_for_stream(id);
    auto stack = on_cpu();
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    auto to_device = [&](const Tensor& result) {
      auto tensor = empty_on_device(result);
      std::vector<Access> write;
      add_access(write, tensor, true);
      auto closure = [target = cpu_alias(tensor), result] { target.copy_(result); };
      submit(id, name_, closure, write);
      host_waits_for_stream(id);
      return tensor;
    };
    size_t count = schema_.returns().size();
    for (size_t i = 0; i < count; ++i) {
      const auto& result = stack[stack.size() - count + i];
      if (const auto* alias = aliased(i)) {
        results_.push_back(*alias);
      } else if (result.isTensor() || result.isTensorList()) {
        results_.push_back(new_result(result, to_device));
      } else {
        results_.push_back(result);
      }
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  std::string name_;
  torch::jit::Stack* stack_;
  torch::jit::Stack arguments_;
  std::vector<bool> written_;
  std::vector<Operand> operands_;  // the tensors of the device among the arguments
  std::vector<Tensor> fresh_;      // the new tensors among the results
  std::vector<IValue> results_;
  Inference inference_;
};

}  // namespace

void queue_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  Call(op, stack).run();
}

}  // namespace sim

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::queue_operator>());
}
