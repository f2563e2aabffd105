//! The operations of a module as TorchScript's source of `forward`: a line for each, plain Python.

use std::fmt::Write;

use crate::nets::graph::{Arithmetic, Body, Gives, Int, Op, Pointwise, Value};
use crate::nets::layers::{BN_EPS, BN_MOMENTUM};

/// `def forward(self, x: Tensor) -> ...`.
pub(super) fn forward(body: &Body) -> String {
    let gives = match body.gives {
        Gives::One(_) => "Tensor",
        Gives::Maps(_) => "Dict[str, Tensor]",
    };
    let mut out = format!("def forward(self, x: Tensor) -> {gives}:\n");
    for (at, op) in body.ops.iter().enumerate().skip(1) {
        for line in statement(&name(Value(at)), op).lines() {
            let _ = writeln!(out, "    {line}");
        }
    }
    let answer = match &body.gives {
        Gives::One(value) => name(*value),
        Gives::Maps(maps) => {
            let maps: Vec<String> = maps.iter().enumerate().map(|(l, map)| format!("\"{l}\": {}", name(*map))).collect();
            format!("{{{}}}", maps.join(", "))
        }
    };
    let _ = writeln!(out, "    return {answer}");
    out
}

fn name(value: Value) -> String {
    if value == Value::INPUT { "x".to_string() } else { format!("v{}", value.0) }
}

fn int(number: Int) -> String {
    match number {
        Int::Is(number) => number.to_string(),
        Int::Of(value) => name(value),
    }
}

fn ints(numbers: &[Int]) -> String {
    numbers.iter().map(|n| int(*n)).collect::<Vec<_>>().join(", ")
}

/// `self.layer1`, and `getattr(self.features, "0")` where a name is no identifier.
fn member(path: &str) -> String {
    path.split('.').fold("self".to_string(), |of, part| match part.starts_with(|c: char| c.is_ascii_digit()) {
        true => format!("getattr({of}, \"{part}\")"),
        false => format!("{of}.{part}"),
    })
}

fn bias(there: bool) -> &'static str {
    if there { "self.bias" } else { "None" }
}

fn statement(to: &str, op: &Op) -> String {
    let expression = match op {
        Op::Input => "x".to_string(),
        Op::Call(child, x) => format!("{}.forward({})", member(child), name(*x)),
        Op::Conv(x, [s, p, d, groups], biased) => {
            format!("torch.conv2d({}, self.weight, {}, [{s}, {s}], [{p}, {p}], [{d}, {d}], {groups})", name(*x), bias(*biased))
        }
        Op::BatchNorm(x) => {
            return format!(
                "if self.training:\n    self.num_batches_tracked.add_(1)\n{to} = torch.batch_norm({}, self.weight, self.bias, self.running_mean, self.running_var, self.training, {BN_MOMENTUM}, {BN_EPS}, True)",
                name(*x)
            );
        }
        Op::LayerNorm(x, width, eps) => format!("torch.layer_norm({}, [{width}], self.weight, self.bias, {eps})", name(*x)),
        Op::Linear(x, biased, _) => format!("torch.linear({}, self.weight, {})", name(*x), bias(*biased)),
        Op::Point(what, x) => {
            let function = match what {
                Pointwise::Relu => "relu_",
                Pointwise::Gelu => "gelu",
                Pointwise::Tanh => "tanh",
                Pointwise::Sigmoid => "sigmoid",
            };
            format!("torch.{function}({})", name(*x))
        }
        Op::Add(a, b) => format!("{} + {}", name(*a), name(*b)),
        Op::Mul(a, b) => format!("{} * {}", name(*a), name(*b)),
        Op::Scale(x, by) => format!("{} * {by:?}", name(*x)),
        Op::MatMul(a, b) => format!("torch.matmul({}, {})", name(*a), name(*b)),
        Op::Softmax(x, dim) => format!("torch.softmax({}, {dim})", name(*x)),
        Op::MaxPool(x, w) => {
            format!(
                "torch.max_pool2d({}, [{k}, {k}], [{s}, {s}], [{p}, {p}], [1, 1], False)",
                name(*x),
                k = w.kernel,
                s = w.stride,
                p = w.padding
            )
        }
        Op::AvgPool(x, w) => {
            let (k, s, p) = (w.kernel, w.stride, w.padding);
            format!("torch.avg_pool2d({}, [{k}, {k}], [{s}, {s}], [{p}, {p}], False, True, None)", name(*x))
        }
        Op::Mean(x) => format!("torch.mean({}, [2, 3], True)", name(*x)),
        Op::Flatten(x) => format!("torch.flatten({}, 1)", name(*x)),
        Op::Reshape(x, shape) => format!("{}.reshape([{}])", name(*x), ints(shape)),
        Op::Permute(x, dims) => format!("{}.permute({dims:?})", name(*x)),
        Op::Concat(parts, dim) => {
            format!("torch.cat([{}], {dim})", parts.iter().map(|part| name(*part)).collect::<Vec<_>>().join(", "))
        }
        Op::Slice(x, dim, from, end, step) => {
            format!("{}[{}{}:{}:{step}]", name(*x), ":, ".repeat(*dim as usize), int(*from), end.map(int).unwrap_or_default())
        }
        Op::Select(x, dim, at) => format!("{}.select({dim}, {at})", name(*x)),
        Op::Pad(x, below, right) => format!("torch.constant_pad_nd({}, [0, 0, 0, {}, 0, {}])", name(*x), int(*right), int(*below)),
        Op::Rotate(x, first) => {
            let (dims, by): (Vec<i64>, Vec<String>) = first.iter().map(|(dim, first)| (*dim, format!("-{}", int(*first)))).unzip();
            format!("torch.roll({}, [{}], {dims:?})", name(*x), by.join(", "))
        }
        // C++'s `module.to(dtype)` converts every buffer, an index too.
        Op::Lookup(table, index) => format!("self.{table}.index_select(0, self.{index}.long())"),
        Op::Steps(length, edges, like) => {
            let reached = edges.iter().map(|edge| format!("{to}.ge({}).type_as({})", int(*edge), name(*like))).collect::<Vec<_>>();
            return format!("{to} = torch.arange({}, device={}.device)\n{to} = {}", int(*length), name(*like), reached.join(" + "));
        }
        Op::Differ(a, b) => format!("torch.ne({a}, {b}).type_as({a})", a = name(*a), b = name(*b)),
        Op::Drop(x, rate) => {
            let x = name(*x);
            return format!(
                "{to} = {x}\nif self.training:\n    keep = torch.rand([{x}.size(0), 1, 1, 1], dtype={x}.dtype, device={x}.device).ge({rate:?}).type_as({x})\n    {to} = {x} * keep / {:?}",
                1.0 - rate
            );
        }
        Op::Size(x, dim) => format!("{}.size({dim})", name(*x)),
        Op::Reckon(what, a, b) => {
            let (a, b) = (int(*a), int(*b));
            match what {
                Arithmetic::Plus => format!("{a} + {b}"),
                Arithmetic::Minus => format!("{a} - {b}"),
                Arithmetic::Times => format!("{a} * {b}"),
                Arithmetic::Over => format!("{a} // {b}"),
                Arithmetic::Least => format!("min({a}, {b})"),
            }
        }
    };
    format!("{to} = {expression}")
}
