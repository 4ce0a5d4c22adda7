#include "memory_on_demand.hpp"

#include <ATen/core/ivalue.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <utility>

namespace lockstep {
namespace {

// Travels in a memory's DataPtr and names its filler.
struct OnDemand {
  MemoryFiller* filler;
  size_t number;
  at::DataPtr memory;  // the memory itself; null: it is empty
};

void delete_on_demand(void* context) {
  delete static_cast<OnDemand*>(context);
}

OnDemand* on_demand_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  return tensor.storage().unsafeGetStorageImpl()->data_ptr().cast_context<OnDemand>(&delete_on_demand);
}

void set_memory(const at::Tensor& flat, at::DataPtr memory, size_t bytes, MemoryFiller& filler, size_t number) {
  auto* const storage = flat.storage().unsafeGetStorageImpl();
  void* const address = memory.get();
  auto context = std::make_unique<OnDemand>(OnDemand{&filler, number, std::move(memory)});
  storage->set_data_ptr_noswap(at::DataPtr(address, context.release(), &delete_on_demand, flat.device()));
  storage->set_nbytes(bytes);
}

// Lists the memories of an operator that belong to one filler.
struct Reading {
  MemoryFiller* filler;
  std::vector<size_t> memories;
};

struct Readings : at::ObserverContext {
  std::vector<Reading> all;
};

void note_memories(const at::Tensor& tensor, std::vector<Reading>& readings) {
  const OnDemand* const memory = on_demand_of(tensor);
  if (memory == nullptr) return;
  auto found = std::find_if(readings.begin(), readings.end(),
                            [&](const Reading& reading) { return reading.filler == memory->filler; });
  if (found == readings.end()) found = readings.insert(found, Reading{memory->filler, {}});
  auto& numbers = found->memories;
  if (std::find(numbers.begin(), numbers.end(), memory->number) == numbers.end()) numbers.push_back(memory->number);
}

void note_memories(const c10::IValue& argument, std::vector<Reading>& readings) {
  if (argument.isTensor()) return note_memories(argument.toTensor(), readings);
  if (argument.isTensorList()) {
    for (const at::Tensor& tensor : argument.toTensorVector()) note_memories(tensor, readings);
  } else if (argument.isOptionalTensorList()) {
    for (const auto& tensor : argument.toOptionalTensorVector()) {
      if (tensor) note_memories(*tensor, readings);
    }
  }
}

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& function) {
  std::vector<Reading> readings;
  try {
    for (const c10::IValue& argument : function.inputs()) note_memories(argument, readings);
  } catch (const std::exception&) {  // the memory is refused; the operator fails in the same way and reports it
    return nullptr;
  }
  if (readings.empty()) return nullptr;
  for (const auto& [filler, memories] : readings) filler->before_operator(memories);
  auto context = std::make_unique<Readings>();
  context->all = std::move(readings);
  return context;
}

void on_end(const at::RecordFunction&, at::ObserverContext* context) {
  if (context == nullptr) return;
  for (const auto& reading : static_cast<Readings*>(context)->all) reading.filler->after_operator();
}

}  // namespace

OperatorWatch::OperatorWatch()
    : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(on_begin, on_end)
                                             .needsInputs(true)
                                             .scopes({at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE}))) {}

OperatorWatch::~OperatorWatch() {
  at::removeCallback(handle_);
}

void empty_memory(const at::Tensor& flat, MemoryFiller& filler, size_t memory) {
  set_memory(flat, at::DataPtr(nullptr, flat.device()), 0, filler, memory);
}

void fill_memory(const at::Tensor& flat, const at::Tensor& from, MemoryFiller& filler, size_t memory) {
  auto* const storage = from.storage().unsafeGetStorageImpl();
  const size_t bytes = storage->nbytes();
  storage->set_nbytes(0);
  set_memory(flat, storage->set_data_ptr(at::DataPtr(nullptr, from.device())), bytes, filler, memory);
}

void leave_memory(const at::Tensor& flat) {
  OnDemand* const memory = on_demand_of(flat);
  if (memory == nullptr) return;
  at::DataPtr own = std::move(memory->memory);
  flat.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(own));
}

// Keeps the full size, so that views can be made and the text tells what is wrong.
void refuse_memory(const at::Tensor& flat, const std::string& text) {
  auto* const storage = flat.storage().unsafeGetStorageImpl();
  storage->set_nbytes(flat.nbytes());
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(text);
}

}  // namespace lockstep
