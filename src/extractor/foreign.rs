//! Networks of anybody's as TorchScript: which of what their `forward` gives is the feature, and how it is pooled. Opening such a file runs code
//! from it; whoever names one allows that.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Deserialize;
use tch::{CModule, Device, IValue, Kind, Tensor};

use crate::error::{Error, Result, libtorch_line};
use crate::params::Named;

/// How a map or a row of tokens becomes one vector an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pool {
    /// The mean over places or tokens.
    Mean,
    /// The first token.
    Cls,
}

impl FromStr for Pool {
    type Err = Error;

    fn from_str(text: &str) -> Result<Pool> {
        match text {
            "mean" => Ok(Pool::Mean),
            "cls" => Ok(Pool::Cls),
            _ => Err(Error::input(format!("pool `{text}`; accepted: mean, cls"))),
        }
    }
}

impl std::fmt::Display for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(match self {
            Pool::Mean => "mean",
            Pool::Cls => "cls",
        })
    }
}

/// What of a network's answer is its feature.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Choice {
    /// The key of a dict or the place in a tuple; needed where there are several.
    pub output: Option<String>,
    /// Needed where an image has several tokens.
    pub pool: Option<Pool>,
}

/// A TorchScript module, ready to be asked.
pub struct Foreign {
    module: CModule,
    choice: Choice,
    path: PathBuf,
    device: Device,
    kind: Kind,
}

impl Foreign {
    /// Loads the module in evaluation mode. What is no TorchScript is the file's fault.
    pub fn open(path: &Path, device: Device, choice: Choice) -> Result<Foreign> {
        std::fs::File::open(path).map_err(Error::open(path))?;
        let fault = |e: tch::TchError| Error::file(path, format!("no TorchScript module: {}", libtorch_line(&e.to_string())));
        let mut module = CModule::load_on_device(path, device).map_err(fault)?;
        module.f_set_eval().map_err(fault)?;
        let first = module.named_parameters().map_err(fault)?.into_iter().map(|(_, t)| t.kind());
        let kind = first.into_iter().find(|kind| matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16));
        Ok(Foreign { module, choice, path: path.to_path_buf(), device, kind: kind.unwrap_or(Kind::Float) })
    }

    /// Its parameters, by name.
    pub fn parameters(&self) -> Result<Named> {
        Ok(self.module.named_parameters()?)
    }

    /// One vector an image, [N, D] in f32, where the module is.
    pub fn features(&self, images: &Tensor) -> Result<Tensor> {
        let images = images.to_device(self.device).to_kind(self.kind);
        let size = images.size();
        let given = self.module.forward_is(&[IValue::Tensor(images)]).map_err(|e| {
            let said = libtorch_line(&e.to_string());
            // TorchScript tells where it was before it tells what went wrong.
            let said = said.rsplit_once("RuntimeError: ").map_or(said.as_str(), |(_, last)| last);
            self.fault(format!("its forward failed on images {size:?}: {said}"))
        })?;
        let rows = pooled(&chosen(given, self.choice.output.as_deref()).map_err(|e| self.fault(e))?, self.choice.pool);
        let rows = rows.map_err(|e| self.fault(e))?;
        if rows.size()[0] != size[0] {
            return Err(self.fault(format!("answers {} images with {} rows", size[0], rows.size()[0])));
        }
        Ok(rows.to_kind(Kind::Float))
    }

    fn fault(&self, what: String) -> Error {
        Error::value_for(&self.path, &["output", "pool"], what)
    }
}

/// The tensor that is asked for among those a network gives.
fn chosen(given: IValue, output: Option<&str>) -> std::result::Result<Tensor, String> {
    let named: Vec<(String, Tensor)> = match given {
        IValue::Tensor(tensor) => match output {
            None => return Ok(tensor),
            Some(name) => return Err(format!("gives one tensor, among which {{output}} {name} has nothing to choose")),
        },
        IValue::GenericDict(pairs) => pairs
            .into_iter()
            .filter_map(|(key, value)| match (key, value) {
                (IValue::String(key), IValue::Tensor(tensor)) => Some((key, tensor)),
                _ => None,
            })
            .collect(),
        IValue::Tuple(values) | IValue::GenericList(values) => values
            .into_iter()
            .enumerate()
            .filter_map(|(i, value)| if let IValue::Tensor(tensor) = value { Some((i.to_string(), tensor)) } else { None })
            .collect(),
        IValue::TensorList(tensors) => tensors.into_iter().enumerate().map(|(i, tensor)| (i.to_string(), tensor)).collect(),
        _ => return Err("its forward gives no tensors; a tensor, or a dict, tuple or list of tensors is wanted".to_string()),
    };
    let known: Vec<String> = named.iter().map(|(name, t)| format!("{name} {:?}", t.size())).collect();
    let mut fitting = named.into_iter().filter(|(name, _)| output.is_none_or(|output| output == name));
    match (fitting.next(), fitting.next()) {
        (Some((_, tensor)), None) => Ok(tensor),
        (None, _) if known.is_empty() => Err("its forward gives no tensors".to_string()),
        (None, _) => Err(format!("has no output {}; known: {}", output.unwrap_or_default(), known.join(", "))),
        (Some(_), Some(_)) => Err(format!("gives several tensors; choose one by {{output}}: {}", known.join(", "))),
    }
}

/// [N, D] of a vector, a map [N, C, H, W] or tokens [N, T, D].
fn pooled(answer: &Tensor, pool: Option<Pool>) -> std::result::Result<Tensor, String> {
    let size = answer.size();
    match (size.len(), pool) {
        (2, None) => Ok(answer.shallow_clone()),
        (4, None | Some(Pool::Mean)) => Ok(answer.mean_dim([2i64, 3].as_slice(), false, None)),
        (3, Some(Pool::Mean)) => Ok(answer.mean_dim(1, false, None)),
        (3, Some(Pool::Cls)) => Ok(answer.select(1, 0)),
        (3, None) => Err(format!("its output {size:?} is a row of tokens for every image; say how to pool it: {{pool}} mean or cls")),
        (2, Some(_)) => Err(format!("its output {size:?} is one vector for every image: {{pool}} has nothing to pool")),
        (4, Some(Pool::Cls)) => Err(format!("its output {size:?} is a map, which has no first token; accepted: {{pool}} mean")),
        _ => Err(format!("its output {size:?} is none of [N, D], [N, T, D] and [N, C, H, W]")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    fn ramp(size: &[i64]) -> Tensor {
        Tensor::arange(size.iter().product::<i64>(), (Kind::Float, Device::Cpu)).view(size)
    }

    #[test]
    fn an_answer_is_pooled_by_its_shape() {
        let of = |size: &[i64], pool| pooled(&ramp(size), pool);
        assert_eq!(of(&[2, 3], None).unwrap(), ramp(&[2, 3]));
        // Two images, three tokens of two numbers: 0 1, 2 3, 4 5 and six more.
        assert_eq!(of(&[2, 3, 2], Some(Pool::Mean)).unwrap(), Tensor::from_slice2(&[[2f32, 3.0], [8.0, 9.0]]));
        assert_eq!(of(&[2, 3, 2], Some(Pool::Cls)).unwrap(), Tensor::from_slice2(&[[0f32, 1.0], [6.0, 7.0]]));
        assert_eq!(of(&[1, 2, 2, 2], None).unwrap(), Tensor::from_slice2(&[[1.5f32, 5.5]]));
        for (size, pool, says) in [
            (&[2, 3, 2][..], None, "{pool} mean or cls"),
            (&[2, 3], Some(Pool::Mean), "nothing to pool"),
            (&[1, 2, 2, 2], Some(Pool::Cls), "no first token"),
            (&[6], None, "none of"),
        ] {
            assert!(of(size, pool).unwrap_err().contains(says), "{size:?}");
        }
    }

    #[test]
    fn one_of_several_outputs_is_named() {
        let dict = || {
            IValue::GenericDict(vec![
                (IValue::String("a".into()), IValue::Tensor(ramp(&[1, 2]))),
                (IValue::String("b".into()), IValue::Tensor(ramp(&[1, 3]))),
            ])
        };
        assert_eq!(chosen(dict(), Some("b")).unwrap().size(), [1, 3]);
        assert_eq!(chosen(dict(), None).unwrap_err(), "gives several tensors; choose one by {output}: a [1, 2], b [1, 3]");
        assert_eq!(chosen(dict(), Some("c")).unwrap_err(), "has no output c; known: a [1, 2], b [1, 3]");
        let tuple = || IValue::Tuple(vec![IValue::Int(1), IValue::Tensor(ramp(&[1, 4]))]);
        assert_eq!(chosen(tuple(), None).unwrap().size(), [1, 4]);
        assert_eq!(chosen(tuple(), Some("1")).unwrap().size(), [1, 4]);
        assert!(chosen(IValue::Tensor(ramp(&[1, 1])), Some("x")).unwrap_err().contains("one tensor"));
        assert!(chosen(IValue::Int(3), None).unwrap_err().contains("no tensors"));
    }
}
