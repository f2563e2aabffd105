// A C++ program that runs an exported network: ./consumer resnet18.pt
#include <torch/script.h>

#include <iostream>

int main(int argc, char **argv) {
  if (argc != 2) return std::cerr << "usage: consumer FILE.pt\n", 2;
  torch::jit::Module body = torch::jit::load(argv[1]);
  torch::NoGradGuard no_grad;
  auto answer = body.forward({torch::rand({1, 3, 224, 224})});
  if (answer.isTensor()) return std::cout << "logits " << answer.toTensor().sizes() << '\n', 0;  // exported with its classifier
  for (const auto &entry : answer.toGenericDict()) std::cout << entry.key().toStringRef() << ' ' << entry.value().toTensor().sizes() << '\n';
}
