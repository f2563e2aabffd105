//! What a module does: a list of operations, each on what earlier ones gave. Sizes of tensors are numbers of their own, so that one
//! description serves any batch and image size.

use super::super::layers::ConvShape;

/// What an operation gave: a tensor, or a whole number where `Int` wraps it. Its place in the list of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Value(pub usize);

impl Value {
    /// What the module is called with.
    pub const INPUT: Value = Value(0);
}

/// A whole number: a size, or what is reckoned from sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Int {
    /// The same for every input.
    Is(i64),
    /// Known when there is an input.
    Of(Value),
}

impl From<i64> for Int {
    fn from(number: i64) -> Int {
        Int::Is(number)
    }
}

/// Operations on single numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pointwise {
    /// In place where a format has that: nothing else may read its input.
    Relu,
    /// With the error function.
    Gelu,
    /// The hyperbolic tangent.
    Tanh,
    /// The logistic function.
    Sigmoid,
}

/// Operations on whole numbers that are not negative.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// a + b
    Plus,
    /// a - b
    Minus,
    /// a * b
    Times,
    /// a / b, rounded down.
    Over,
    /// The smaller one.
    Least,
}

/// The geometry of a pooling, the same in both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Its side.
    pub kernel: i64,
    /// Its steps.
    pub stride: i64,
    /// What lies around the input: zeros for a mean, and never the largest.
    pub padding: i64,
}

/// One operation. Tensors `weight`, `bias` and so on are those of the module.
#[derive(Debug, Clone)]
pub enum Op {
    /// What the module was called with.
    Input,
    /// What the child of this dotted name makes of a tensor.
    Call(String, Value),
    /// A convolution with `weight`, and `bias` if the last is true: stride, padding, dilation, groups.
    Conv(Value, [i64; 4], bool),
    /// With `weight`, `bias`, `running_mean`, `running_var`, `num_batches_tracked`: the batch's statistics in training, running ones else.
    BatchNorm(Value),
    /// Over the last dimension, of this width, with `weight`, `bias` and this epsilon.
    LayerNorm(Value, i64, f64),
    /// On the last dimension, with `weight`, and `bias` if the first is true; the second tells that the tensor is [B, d].
    Linear(Value, bool, bool),
    /// Number by number.
    Point(Pointwise, Value),
    /// The sum; sizes of 1 are stretched, here and in `Mul`.
    Add(Value, Value),
    /// The product.
    Mul(Value, Value),
    /// The product with a constant.
    Scale(Value, f64),
    /// The matrix product of the last two dimensions.
    MatMul(Value, Value),
    /// Over this dimension.
    Softmax(Value, i64),
    /// The largest number of each window.
    MaxPool(Value, Window),
    /// The mean of each window; the padding counts as zeros.
    AvgPool(Value, Window),
    /// The mean of every channel: [B, c, h, w] -> [B, c, 1, 1].
    Mean(Value),
    /// [B, ...] -> [B, d]
    Flatten(Value),
    /// The same numbers in another shape; -1 is what remains.
    Reshape(Value, Vec<Int>),
    /// The dimensions in this order.
    Permute(Value, Vec<i64>),
    /// One after another along this dimension.
    Concat(Vec<Value>, i64),
    /// Of this dimension, positions from one number to below another (or the end) in steps.
    Slice(Value, i64, Int, Option<Int>, i64),
    /// One position of this dimension, which goes away.
    Select(Value, i64, i64),
    /// [B, h, w, c] with this many rows of zeros below and columns to the right.
    Pad(Value, Int, Int),
    /// Along each of these dimensions the given position comes first, and what was before it last.
    Rotate(Value, Vec<(i64, Int)>),
    /// The rows of the parameter of the first name that the buffer of the second name lists.
    Lookup(&'static str, &'static str),
    /// For the positions 0, 1, ... below the first number, how many of the others each has reached; of the tensor's type.
    Steps(Int, Vec<Int>, Value),
    /// 1 where two tensors differ, else 0.
    Differ(Value, Value),
    /// In training, for each image all of it divided by 1 - rate, or nothing, at this rate.
    Drop(Value, f64),
    /// The size of a dimension.
    Size(Value, i64),
    /// A whole number reckoned from two.
    Reckon(Arithmetic, Int, Int),
}

/// What a body ends with.
#[derive(Debug, Clone)]
pub enum Gives {
    /// One tensor.
    One(Value),
    /// The maps "0", "1", ...
    Maps(Vec<Value>),
}

/// The operations of a module in order.
#[derive(Debug, Clone)]
pub struct Body {
    /// The first is `Op::Input`.
    pub ops: Vec<Op>,
    /// What the module answers.
    pub gives: Gives,
}

impl Body {
    /// Those of `work`, which is called with the input.
    pub fn new(work: impl FnOnce(&mut Body, Value) -> Value) -> Body {
        let mut body = Body { ops: vec![Op::Input], gives: Gives::One(Value::INPUT) };
        let last = work(&mut body, Value::INPUT);
        body.gives(Gives::One(last));
        body
    }

    pub(super) fn gives(&mut self, gives: Gives) {
        self.gives = gives;
    }

    fn push(&mut self, op: Op) -> Value {
        self.ops.push(op);
        Value(self.ops.len() - 1)
    }

    /// What the child of this dotted name makes of `x`.
    pub fn call(&mut self, child: impl Into<String>, x: Value) -> Value {
        self.push(Op::Call(child.into(), x))
    }

    /// Children one after another.
    pub fn calls<S: Into<String>>(&mut self, children: impl IntoIterator<Item = S>, x: Value) -> Value {
        children.into_iter().fold(x, |x, child| self.call(child, x))
    }

    pub(super) fn conv(&mut self, x: Value, shape: ConvShape, bias: bool) -> Value {
        self.push(Op::Conv(x, [shape.stride, shape.padding, shape.dilation, shape.groups], bias))
    }

    pub(super) fn batch_norm(&mut self, x: Value) -> Value {
        self.push(Op::BatchNorm(x))
    }

    pub(super) fn layer_norm(&mut self, x: Value, width: i64, eps: f64) -> Value {
        self.push(Op::LayerNorm(x, width, eps))
    }

    pub(super) fn linear(&mut self, x: Value, bias: bool, vectors: bool) -> Value {
        self.push(Op::Linear(x, bias, vectors))
    }

    /// See `Pointwise::Relu`.
    pub fn relu(&mut self, x: Value) -> Value {
        self.point(Pointwise::Relu, x)
    }

    /// Number by number.
    pub fn point(&mut self, what: Pointwise, x: Value) -> Value {
        self.push(Op::Point(what, x))
    }

    /// a + b
    pub fn add(&mut self, a: Value, b: Value) -> Value {
        self.push(Op::Add(a, b))
    }

    /// a * b
    pub fn mul(&mut self, a: Value, b: Value) -> Value {
        self.push(Op::Mul(a, b))
    }

    /// x times a constant.
    pub fn scale(&mut self, x: Value, by: f64) -> Value {
        self.push(Op::Scale(x, by))
    }

    /// The matrix product.
    pub fn matmul(&mut self, a: Value, b: Value) -> Value {
        self.push(Op::MatMul(a, b))
    }

    /// Over this dimension.
    pub fn softmax(&mut self, x: Value, dim: i64) -> Value {
        self.push(Op::Softmax(x, dim))
    }

    /// The largest number of each window.
    pub fn max_pool(&mut self, x: Value, window: Window) -> Value {
        self.push(Op::MaxPool(x, window))
    }

    /// The mean of each window.
    pub fn avg_pool(&mut self, x: Value, window: Window) -> Value {
        self.push(Op::AvgPool(x, window))
    }

    /// The mean of every channel.
    pub fn mean(&mut self, x: Value) -> Value {
        self.push(Op::Mean(x))
    }

    /// [B, ...] -> [B, d]
    pub fn flatten(&mut self, x: Value) -> Value {
        self.push(Op::Flatten(x))
    }

    /// The same numbers in another shape.
    pub fn reshape(&mut self, x: Value, shape: impl Into<Vec<Int>>) -> Value {
        self.push(Op::Reshape(x, shape.into()))
    }

    /// The dimensions in this order.
    pub fn permute(&mut self, x: Value, dims: &[i64]) -> Value {
        self.push(Op::Permute(x, dims.to_vec()))
    }

    /// One after another along a dimension.
    pub fn concat(&mut self, parts: &[Value], dim: i64) -> Value {
        self.push(Op::Concat(parts.to_vec(), dim))
    }

    /// Positions of a dimension, see `Op::Slice`.
    pub fn slice(&mut self, x: Value, dim: i64, from: impl Into<Int>, to: Option<Int>, step: i64) -> Value {
        self.push(Op::Slice(x, dim, from.into(), to, step))
    }

    /// One position of a dimension.
    pub fn select(&mut self, x: Value, dim: i64, at: i64) -> Value {
        self.push(Op::Select(x, dim, at))
    }

    /// See `Op::Pad`.
    pub fn pad(&mut self, x: Value, below: Int, right: Int) -> Value {
        self.push(Op::Pad(x, below, right))
    }

    /// See `Op::Rotate`.
    pub fn rotate(&mut self, x: Value, first: &[(i64, Int)]) -> Value {
        self.push(Op::Rotate(x, first.to_vec()))
    }

    /// See `Op::Lookup`.
    pub fn lookup(&mut self, table: &'static str, index: &'static str) -> Value {
        self.push(Op::Lookup(table, index))
    }

    /// See `Op::Steps`.
    pub fn steps(&mut self, length: Int, edges: &[Int], like: Value) -> Value {
        self.push(Op::Steps(length, edges.to_vec(), like))
    }

    /// 1 where two tensors differ.
    pub fn differ(&mut self, a: Value, b: Value) -> Value {
        self.push(Op::Differ(a, b))
    }

    /// See `Op::Drop`.
    pub fn drop_path(&mut self, x: Value, rate: f64) -> Value {
        self.push(Op::Drop(x, rate))
    }

    /// The size of a dimension.
    pub fn size(&mut self, x: Value, dim: i64) -> Int {
        Int::Of(self.push(Op::Size(x, dim)))
    }

    /// A whole number from two; at once where both are known.
    pub fn reckon(&mut self, a: impl Into<Int>, what: Arithmetic, b: impl Into<Int>) -> Int {
        match (a.into(), b.into()) {
            (Int::Is(a), Int::Is(b)) => Int::Is(match what {
                Arithmetic::Plus => a + b,
                Arithmetic::Minus => a - b,
                Arithmetic::Times => a * b,
                Arithmetic::Over => a / b,
                Arithmetic::Least => a.min(b),
            }),
            (a, b) => Int::Of(self.push(Op::Reckon(what, a, b))),
        }
    }

    /// Channels of [B, c, h, w] dealt out anew: the first of each of `groups` groups, then the second of each, and so on.
    pub fn shuffle(&mut self, x: Value, groups: i64) -> Value {
        let [b, h, w] = [0, 2, 3].map(|dim| self.size(x, dim));
        let grouped = self.reshape(x, [b, groups.into(), (-1).into(), h, w]);
        let dealt = self.permute(grouped, &[0, 2, 1, 3, 4]);
        self.reshape(dealt, [b, (-1).into(), h, w])
    }
}
