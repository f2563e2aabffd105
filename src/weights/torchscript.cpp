// Builds, saves and lists torch::jit modules for torchscript.rs: tch can only trace, and a traced network cannot be trained.
// Every function leaves null in *error, or a message that mcl_script_free_text frees.

#include <torch/script.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <sstream>
#include <string>

using torch::jit::Module;

namespace {

template <typename Work>
void guarded(char **error, Work work) {
  *error = nullptr;
  try {
    work();
  } catch (const c10::Error &e) {
    *error = strdup(e.what_without_backtrace());
  } catch (const std::exception &e) {
    *error = strdup(e.what());
  }
}

}  // namespace

extern "C" {

void mcl_script_free_text(char *text) { free(text); }

void mcl_script_free(Module *module) { delete module; }

// A module of its own class, in evaluation mode.
Module *mcl_script_new(const char *class_name, char **error) {
  Module *module = nullptr;
  guarded(error, [&] {
    module = new Module(c10::QualifiedName(class_name));
    module->register_attribute("training", c10::BoolType::get(), false);
  });
  return module;
}

// The module keeps a copy of the numbers: training it leaves the network it came from alone.
void mcl_script_tensor(Module *module, const char *name, const torch::Tensor *tensor, bool trained, char **error) {
  guarded(error, [&] {
    torch::Tensor own = tensor->detach().cpu().clone(torch::MemoryFormat::Contiguous);
    if (trained) {
      module->register_parameter(name, own.set_requires_grad(true), false);
    } else {
      module->register_buffer(name, own);
    }
  });
}

void mcl_script_int(Module *module, const char *name, int64_t value, char **error) {
  guarded(error, [&] { module->register_attribute(name, c10::IntType::get(), value); });
}

void mcl_script_child(Module *parent, const char *name, const Module *child, char **error) {
  guarded(error, [&] { parent->register_module(name, *child); });
}

void mcl_script_define(Module *module, const char *source, char **error) {
  guarded(error, [&] { module->define(source); });
}

// The archive in memory, freed by mcl_script_free_text; its length is left in *size. libtorch's own writer to a file throws from a
// destructor when the disk is full, which ends the process.
char *mcl_script_save(const Module *module, size_t *size, char **error) {
  char *bytes = nullptr;
  guarded(error, [&] {
    std::ostringstream out;
    module->save(out);
    const std::string archive = out.str();
    *size = archive.size();
    bytes = static_cast<char *>(malloc(archive.size()));
    if (!bytes) throw std::bad_alloc();
    memcpy(bytes, archive.data(), archive.size());
  });
  return bytes;
}

Module *mcl_script_load(const char *path, char **error) {
  Module *module = nullptr;
  guarded(error, [&] { module = new Module(torch::jit::load(path, c10::kCPU)); });
  return module;
}

// One line each: `parameter NAME`, `buffer NAME`, `child NAME`, in the order of registration; of children all levels.
char *mcl_script_names(const Module *module, char **error) {
  std::ostringstream out;
  guarded(error, [&] {
    for (const auto &entry : module->named_parameters()) out << "parameter " << entry.name << '\n';
    for (const auto &entry : module->named_buffers()) out << "buffer " << entry.name << '\n';
    for (const auto &entry : module->named_modules()) {
      if (!entry.name.empty()) out << "child " << entry.name << '\n';
    }
  });
  return *error ? nullptr : strdup(out.str().c_str());
}

}
