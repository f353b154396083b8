// A call of an operator as a key: equal keys have results of equal shapes, strides and types.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>

namespace sim {

class CallKey {
 public:
  // The key, or nothing if an argument is of a kind that has none.
  static std::optional<std::string> of(const c10::FunctionSchema& schema, const torch::jit::Stack& arguments) {
    if (schema.name().rfind("aten::", 0) != 0) {
      return std::nullopt;  // operators of tests may be registered anew
    }
    CallKey key;
    key.text_ = schema.name() + '.' + schema.overload_name() + ' ';
    key.add_bytes(c10::get_default_dtype_as_scalartype());
    for (const auto& argument : arguments) {
      if (!key.add(argument)) {
        return std::nullopt;
      }
    }
    return std::move(key.text_);
  }

 private:
  template <class Value>
  void add_bytes(const Value& value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  template <class List>
  void add_list(const List& list) {
    add_bytes(list.size());
    for (const auto& value : list) {
      add_bytes(value);
    }
  }

  void add_tensor(const at::Tensor& tensor) {
    text_ += tensor.defined() ? 'T' : 'U';
    if (tensor.defined()) {
      add_bytes(tensor.scalar_type());
      add_bytes(tensor.device().type());
      add_bytes(tensor.unsafeGetTensorImpl()->is_wrapped_number());
      add_list(tensor.sizes());
      add_list(tensor.strides());
    }
  }

  bool add(const c10::IValue& value) {
    if (value.isNone()) {
      text_ += 'N';
    } else if (value.isTensor()) {
      add_tensor(value.toTensor());
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      auto list = value.toListRef();
      text_ += 'L';
      add_bytes(list.size());
      for (const auto& element : list) {
        add(element);
      }
    } else if (value.isInt()) {
      text_ += 'i';
      add_bytes(value.toInt());
    } else if (value.isBool()) {
      text_ += value.toBool() ? 't' : 'f';
    } else if (value.isDouble()) {
      text_ += 'd';
      add_bytes(value.toDouble());
    } else if (value.isComplexDouble()) {
      text_ += 'c';
      add_bytes(value.toComplexDouble());
    } else if (value.isIntList()) {
      text_ += 'I';
      add_list(value.toIntVector());
    } else if (value.isDoubleList()) {
      text_ += 'D';
      add_list(value.toDoubleVector());
    } else if (value.isBoolList()) {
      auto list = value.toBoolList();
      text_ += 'B';
      add_bytes(list.size());
      for (bool element : list) {
        text_ += element ? 't' : 'f';
      }
    } else if (value.isString()) {
      text_ += 's' + value.toStringRef() + '\0';
    } else if (value.isDevice()) {
      text_ += 'v';
    } else {
      return false;
    }
    return true;
  }

  std::string text_;
};

}  // namespace sim
