// A C++ program that runs an exported backbone: ./consumer resnet18.pt
#include <torch/script.h>

#include <iostream>

int main(int argc, char **argv) {
  if (argc != 2) return std::cerr << "usage: consumer FILE.pt\n", 2;
  torch::jit::Module body = torch::jit::load(argv[1]);
  torch::NoGradGuard no_grad;
  auto maps = body.forward({torch::rand({1, 3, 224, 224})}).toGenericDict();
  for (const auto &entry : maps) std::cout << entry.key().toStringRef() << ' ' << entry.value().toTensor().sizes() << '\n';
}
