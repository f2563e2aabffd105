//! What a file answers, by ONNX's definitions of its operators and libtorch's arithmetic: enough for every network that we write.

use std::collections::HashMap;

use tch::{Kind, Tensor};

use super::{Attribute, Model, Node};
use crate::error::{Error, Result};

impl Model {
    /// The answers to images, in the order of `outputs`.
    pub fn run(&self, images: &Tensor) -> Result<Vec<Tensor>> {
        let mut values: HashMap<&str, Tensor> = self.tensors.iter().map(|(name, t)| (name.as_str(), t.shallow_clone())).collect();
        if let Some(input) = self.inputs.first() {
            values.insert(&input.name, images.shallow_clone());
        }
        for node in &self.nodes {
            let wrong = |what: String| Error::failed(format!("ONNX, {} {}: {what}", node.op, node.name));
            let missing = |name: &str| wrong(format!("nothing gives `{name}`"));
            let inputs: Vec<&Tensor> =
                node.inputs.iter().map(|n| values.get(n.as_str()).ok_or_else(|| missing(n))).collect::<Result<_>>()?;
            let output = operate(node, &inputs).map_err(|e| wrong(e.to_string()))?;
            let name = node.outputs.first().ok_or_else(|| wrong("no output".to_string()))?;
            values.insert(name, output);
        }
        let answer = |name: &String| values.get(name.as_str()).map(Tensor::shallow_clone);
        let outputs =
            self.outputs.iter().map(|port| answer(&port.name).ok_or_else(|| Error::failed(format!("ONNX: nothing gives `{}`", port.name))));
        outputs.collect()
    }
}

fn whole(node: &Node, name: &str, otherwise: i64) -> i64 {
    if let Some(Attribute::Int(value)) = node.attribute(name) { *value } else { otherwise }
}

fn wholes(node: &Node, name: &str, otherwise: &[i64]) -> Vec<i64> {
    if let Some(Attribute::Ints(values)) = node.attribute(name) { values.clone() } else { otherwise.to_vec() }
}

fn epsilon(node: &Node) -> f64 {
    if let Some(Attribute::Float(value)) = node.attribute("epsilon") { f64::from(*value) } else { 1e-5 }
}

/// The numbers of a tensor of whole numbers.
fn numbers(t: &Tensor) -> Result<Vec<i64>> {
    Ok(Vec::<i64>::try_from(t.f_reshape([-1])?)?)
}

/// Padding that is the same before and after, as libtorch's operators have it.
fn symmetric(node: &Node) -> Result<Vec<i64>> {
    let pads = wholes(node, "pads", &[0; 4]);
    let (before, after) = pads.split_at(pads.len() / 2);
    if before == after { Ok(before.to_vec()) } else { Err(Error::failed(format!("pads {pads:?} are not symmetric"))) }
}

fn operate(node: &Node, inputs: &[&Tensor]) -> Result<Tensor> {
    let at = |i: usize| inputs.get(i).copied().ok_or_else(|| Error::failed(format!("has no input {i}")));
    let x = at(0)?;
    Ok(match node.op.as_str() {
        "Conv" => {
            let (strides, dilations) = (wholes(node, "strides", &[1, 1]), wholes(node, "dilations", &[1, 1]));
            x.f_conv2d(at(1)?, inputs.get(2).copied(), strides, symmetric(node)?, dilations, whole(node, "group", 1))?
        }
        "BatchNormalization" => x.f_batch_norm(Some(at(1)?), Some(at(2)?), Some(at(3)?), Some(at(4)?), false, 0.0, epsilon(node), false)?,
        "LayerNormalization" => x.f_layer_norm(at(1)?.size(), Some(at(1)?), Some(at(2)?), epsilon(node), false)?,
        "Gemm" => {
            let weight = if whole(node, "transB", 0) == 1 { at(1)?.f_transpose(0, 1)? } else { at(1)?.shallow_clone() };
            let y = x.f_matmul(&weight)?;
            inputs.get(2).map_or(Ok(y.shallow_clone()), |bias| y.f_add(bias))?
        }
        "MatMul" => x.f_matmul(at(1)?)?,
        "Add" => x.f_add(at(1)?)?,
        "Sub" => x.f_sub(at(1)?)?,
        "Mul" => x.f_mul(at(1)?)?,
        "Div" if x.kind() == Kind::Int64 => x.f_div_tensor_mode(at(1)?, "trunc")?,
        "Div" => x.f_div(at(1)?)?,
        "Min" => x.f_minimum(at(1)?)?,
        "Relu" => x.f_relu()?,
        "Erf" => x.f_erf()?,
        "Tanh" => x.f_tanh()?,
        "Sigmoid" => x.f_sigmoid()?,
        "Softmax" => x.f_softmax(whole(node, "axis", -1), None)?,
        "MaxPool" => {
            let strides = wholes(node, "strides", &[1, 1]);
            x.f_max_pool2d(wholes(node, "kernel_shape", &[]), strides, symmetric(node)?, [1, 1], whole(node, "ceil_mode", 0) == 1)?
        }
        "AveragePool" => {
            let (strides, ceil) = (wholes(node, "strides", &[1, 1]), whole(node, "ceil_mode", 0) == 1);
            let padded = whole(node, "count_include_pad", 0) == 1;
            x.f_avg_pool2d(wholes(node, "kernel_shape", &[]), strides, symmetric(node)?, ceil, padded, None::<i64>)?
        }
        "GlobalAveragePool" => x.f_mean_dim([2i64, 3].as_slice(), true, None)?,
        "Flatten" => x.f_flatten(whole(node, "axis", 1), -1)?,
        "Reshape" => {
            let size = x.size();
            let shape = numbers(at(1)?)?.into_iter().enumerate();
            let shape: Vec<i64> = shape.map(|(i, dim)| if dim == 0 { size.get(i).copied().unwrap_or(0) } else { dim }).collect();
            x.f_reshape(shape)?
        }
        "Transpose" => x.f_permute(wholes(node, "perm", &[]))?,
        "Concat" => Tensor::f_cat(inputs, whole(node, "axis", 0))?,
        "Slice" => {
            let (starts, ends, axes, steps) = (numbers(at(1)?)?, numbers(at(2)?)?, numbers(at(3)?)?, numbers(at(4)?)?);
            let mut y = x.shallow_clone();
            for (((start, end), axis), step) in starts.into_iter().zip(ends).zip(axes).zip(steps) {
                y = y.f_slice(axis, start, end, step)?;
            }
            y
        }
        "Gather" => {
            let (axis, index) = (whole(node, "axis", 0), at(1)?);
            let picked = x.f_index_select(axis, &index.f_reshape([-1])?)?;
            if index.dim() == 0 { picked.f_squeeze_dim(axis)? } else { picked }
        }
        "Pad" => {
            let pads = numbers(at(1)?)?;
            let (before, after) = pads.split_at(pads.len() / 2);
            // libtorch begins with the last dimension.
            let pads: Vec<i64> = before.iter().zip(after).rev().flat_map(|(b, a)| [*b, *a]).collect();
            x.f_constant_pad_nd(pads)?
        }
        "Shape" => Tensor::from_slice(&x.size()),
        "Squeeze" => x.f_squeeze()?,
        "Range" => {
            let (end, step) = (at(1)?.int64_value(&[]), at(2)?.int64_value(&[]));
            Tensor::f_arange_start_step(x.int64_value(&[]), end, step, (Kind::Int64, x.device()))?
        }
        "GreaterOrEqual" => x.f_ge_tensor(at(1)?)?,
        "Equal" => x.f_eq_tensor(at(1)?)?,
        "Not" => x.f_logical_not()?,
        "Cast" if whole(node, "to", 0) == 1 => x.f_to_kind(Kind::Float)?,
        other => return Err(Error::failed(format!("we do not run {other}"))),
    })
}
