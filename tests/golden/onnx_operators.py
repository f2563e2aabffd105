"""Writes onnx_operators.onnx and onnx_operators.npz: a graph with every operator that mcl writes, by the onnx package, and what ONNX Runtime
makes of it. Made with onnx 1.23.2 and onnxruntime 1.31.1:  python tests/golden/onnx_operators.py
"""
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

here = Path(__file__).parent
rng = np.random.default_rng(1)
tensors, nodes, outputs = [], [], []


def tensor(name, value):
    tensors.append(numpy_helper.from_array(np.asarray(value), name))
    return name


def floats(name, *shape):
    return tensor(name, rng.standard_normal(shape).astype(np.float32))


def whole(*numbers):
    name = "int_" + "_".join(map(str, numbers))
    if all(t.name != name for t in tensors):
        tensor(name, np.array(numbers, dtype=np.int64))
    return name


def node(op, inputs, keep=False, **attributes):
    name = f"{op}_{len(nodes)}"
    nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
    if keep:
        outputs.append(name)
    return name


x = "input"  # [2, 3, 9, 7]
conv = node(
    "Conv", [x, floats("conv.weight", 6, 1, 3, 3), floats("conv.bias", 6)], dilations=[2, 2], group=3, kernel_shape=[3, 3], pads=[2] * 4, strides=[2, 1]
)
norm = node(
    "BatchNormalization",
    [conv, floats("bn.weight", 6), floats("bn.bias", 6), floats("bn.mean", 6), tensor("bn.var", rng.uniform(0.5, 2, 6).astype(np.float32))],
    epsilon=1e-3,
)
pooled = node("MaxPool", [node("Relu", [norm])], keep=True, kernel_shape=[3, 3], pads=[1] * 4, strides=[2, 2])
node("AveragePool", [norm], keep=True, kernel_shape=[3, 3], pads=[1] * 4, strides=[2, 2], count_include_pad=1)
mean = node("Flatten", [node("GlobalAveragePool", [pooled])], axis=1)
node("Gemm", [mean, floats("fc.weight", 4, 6), floats("fc.bias", 4)], keep=True, transB=1)
last = node("Transpose", [norm], perm=[0, 2, 3, 1])  # [2, 5, 7, 6]
layer = node("LayerNormalization", [last, floats("ln.weight", 6), floats("ln.bias", 6)], keep=True, axis=-1, epsilon=1e-2)
product = node("MatMul", [layer, floats("matrix", 6, 4)])
node("Softmax", [node("Tanh", [product])], keep=True, axis=1)
node("Sigmoid", [node("Erf", [product])], keep=True)
shape = node("Shape", [last])
height = node("Gather", [shape, whole(1)], axis=0)  # [5]
below = node("Sub", [node("Mul", [node("Div", [node("Add", [height, whole(3)]), whole(4)]), whole(4)]), height])  # 3
pads = node("Concat", [whole(0, 0, 0, 0, 0), node("Min", [below, whole(9)]), whole(1), whole(0)], axis=0)
padded = node("Pad", [last, pads], keep=True)  # [2, 8, 8, 6]
part = node("Slice", [padded, whole(1), whole(2**63 - 1), whole(2), whole(2)])
turned = node("Concat", [node("Slice", [part, below, whole(2**63 - 1), whole(1), whole(1)]), node("Slice", [part, whole(0), below, whole(1), whole(1)])], axis=1)
node("Reshape", [turned, node("Concat", [whole(2, -1), below, whole(4)], axis=0)], keep=True)  # [2, 16, 3, 4] of [2, 8, 4, 6]
node("Gather", [turned, tensor("at_2", np.int64(2))], keep=True, axis=3)
node("Gather", [floats("table", 5, 2), whole(4, 0, 0, 3)], keep=True, axis=0)
places = node("Range", [tensor("at_0", np.int64(0)), node("Squeeze", [height]), tensor("at_1", np.int64(1))])
steps = node("Cast", [node("GreaterOrEqual", [places, whole(3)])], to=TensorProto.FLOAT)
other = node("Cast", [node("GreaterOrEqual", [places, whole(1)])], to=TensorProto.FLOAT)
node("Cast", [node("Not", [node("Equal", [steps, other])])], keep=True, to=TensorProto.FLOAT)
node("Div", [node("Mul", [product, tensor("half", np.float32(0.5))]), tensor("root", np.float32(1.5))], keep=True)

port = lambda name, rank: helper.make_tensor_value_info(name, TensorProto.FLOAT, [f"{name}_{i}" for i in range(rank)])
ranks = dict(zip(outputs, (4, 4, 2, 4, 4, 4, 4, 4, 3, 2, 1, 4), strict=True))
graph = helper.make_graph(nodes, "operators", [port(x, 4)], [port(name, rank) for name, rank in ranks.items()], tensors)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
onnx.checker.check_model(model, full_check=True)
onnx.save(model, here / "onnx_operators.onnx")
images = rng.standard_normal((2, 3, 9, 7)).astype(np.float32)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
answers = session.run(outputs, {x: images})
np.savez(here / "onnx_operators.npz", input=images, **{f"{i:02}": answer for i, answer in enumerate(answers)})
print(sorted({n.op_type for n in nodes}), len(outputs))
