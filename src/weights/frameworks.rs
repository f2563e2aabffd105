//! What other frameworks call the tensors of our networks, both ways: MMDetection's ResNet and Swin, timm's Swin, Detectron2's ResNet.
//! torchvision's names are ours; timm's ResNet has them too.

use std::path::Path;

use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::files;
use crate::params::Named;
use crate::pickle;

/// Rows of whole parts of dotted names, ours and MMDetection's, for Swin.
const MMDET_SWIN: &[(&str, &str)] = &[("attn", "attn.w_msa"), ("mlp.0", "ffn.layers.0.0"), ("mlp.3", "ffn.layers.1")];

/// What stands before the names of a Swin: MMDetection's loader takes nothing else.
const BACKBONE: &str = "backbone.";

fn swap_parts(name: &str, rows: &[(&str, &str)], back: bool) -> String {
    let dotted = format!(".{name}.");
    let renamed = rows.iter().fold(dotted, |name, (ours, theirs)| {
        let (from, to) = if back { (theirs, ours) } else { (ours, theirs) };
        name.replacen(&format!(".{from}."), &format!(".{to}."), 1)
    });
    renamed[1..renamed.len() - 1].to_string()
}

/// MMDetection's name of a tensor of torchvision's Swin.
pub fn mmdet_swin_name(ours: &str) -> Option<String> {
    let rest = ours.strip_prefix("features.")?;
    let (place, rest) = rest.split_once('.')?;
    let place: usize = place.parse().ok()?;
    let theirs = match (place, place % 2) {
        (0, _) => format!("patch_embed.{}", swap_parts(rest, &[("0", "projection"), ("2", "norm")], false)),
        (_, 1) => format!("stages.{}.blocks.{}", place / 2, swap_parts(rest, MMDET_SWIN, false)),
        // The merging before our stage l is the last thing in their stage l - 1.
        _ => format!("stages.{}.downsample.{rest}", place / 2 - 1),
    };
    Some(format!("{BACKBONE}{theirs}"))
}

/// The way back.
pub fn our_swin_name(theirs: &str) -> Option<String> {
    let rest = theirs.strip_prefix(BACKBONE)?;
    if let Some(rest) = rest.strip_prefix("patch_embed.") {
        return Some(format!("features.0.{}", swap_parts(rest, &[("0", "projection"), ("2", "norm")], true)));
    }
    let (stage, rest) = rest.strip_prefix("stages.")?.split_once('.')?;
    let stage: usize = stage.parse().ok()?;
    match rest.split_once('.')? {
        ("blocks", rest) => Some(format!("features.{}.{}", 2 * stage + 1, swap_parts(rest, MMDET_SWIN, true))),
        ("downsample", rest) => Some(format!("features.{}.{rest}", 2 * stage + 2)),
        _ => None,
    }
}

/// The four neighbours a patch merging joins: torchvision has them one after another (left column first), MMDetection unfolds them
/// inside each channel, row by row. On the last dimension of `tensor`.
fn regroup(tensor: &Tensor, back: bool) -> Tensor {
    let size = tensor.size();
    let (rows, width) = (size[..size.len() - 1].iter().product::<i64>(), size[size.len() - 1]);
    // Swapping the second and the third neighbour undoes itself.
    let order = Tensor::from_slice(&[0i64, 2, 1, 3]).to_device(tensor.device());
    let grouped = if back {
        tensor.view([rows, width / 4, 4]).transpose(1, 2).index_select(1, &order)
    } else {
        tensor.view([rows, 4, width / 4]).index_select(1, &order).transpose(1, 2)
    };
    grouped.reshape(size)
}

fn is_merging(theirs: &str) -> bool {
    theirs.contains(".downsample.")
}

/// Side of the square table of a window's pairs of positions.
fn window_side(numel: i64) -> i64 {
    (numel as f64).sqrt().round() as i64
}

/// A Swin backbone as `mmdet.SwinTransformer` wants it (`convert_weights=False`).
pub fn to_mmdet_swin(ours: &Named) -> Result<Named> {
    let convert = |(name, tensor): &(String, Tensor)| {
        let theirs = mmdet_swin_name(name).ok_or_else(|| Error::failed(format!("`{name}` has no place in MMDetection's Swin")))?;
        let tensor = if is_merging(&theirs) {
            regroup(tensor, false)
        } else if theirs.ends_with("relative_position_index") {
            let n = window_side(tensor.numel() as i64);
            tensor.view([n, n])
        } else {
            tensor.shallow_clone()
        };
        Ok((theirs, tensor))
    };
    ours.iter().map(convert).collect()
}

/// The way back; what is not a Swin's keeps its name.
pub fn from_mmdet_swin(theirs: &Named) -> Named {
    let convert = |(name, tensor): &(String, Tensor)| match our_swin_name(name) {
        Some(ours) if is_merging(name) => (ours, regroup(tensor, true)),
        Some(ours) if name.ends_with("relative_position_index") => (ours, tensor.reshape([-1])),
        Some(ours) => (ours, tensor.shallow_clone()),
        None => (name.clone(), tensor.shallow_clone()),
    };
    theirs.iter().map(convert).collect()
}

/// Rows of whole parts of dotted names, ours and timm's, for a block of Swin.
const TIMM_SWIN: &[(&str, &str)] = &[("mlp.0", "mlp.fc1"), ("mlp.3", "mlp.fc2")];

/// timm's name of a tensor of torchvision's Swin. None for the index of positions, which timm reckons itself.
pub fn timm_swin_name(ours: &str) -> Option<String> {
    if ours.ends_with("relative_position_index") {
        return None;
    }
    let Some(rest) = ours.strip_prefix("features.") else {
        return Some(swap_parts(ours, &[("head", "head.fc")], false));
    };
    let (place, rest) = rest.split_once('.')?;
    let place: usize = place.parse().ok()?;
    Some(match (place, place % 2) {
        (0, _) => format!("patch_embed.{}", swap_parts(rest, &[("0", "proj"), ("2", "norm")], false)),
        (_, 1) => format!("layers.{}.blocks.{}", place / 2, swap_parts(rest, TIMM_SWIN, false)),
        _ => format!("layers.{}.downsample.{rest}", place / 2),
    })
}

/// The way back; what is not a Swin's keeps its name.
pub fn from_timm_swin_name(theirs: &str) -> String {
    if let Some(rest) = theirs.strip_prefix("patch_embed.") {
        return format!("features.0.{}", swap_parts(rest, &[("0", "proj"), ("2", "norm")], true));
    }
    let stage = theirs.strip_prefix("layers.").and_then(|rest| rest.split_once('.'));
    let parsed = stage.and_then(|(stage, rest)| Some((stage.parse::<usize>().ok()?, rest.split_once('.')?)));
    match parsed {
        Some((stage, ("blocks", rest))) => format!("features.{}.{}", 2 * stage + 1, swap_parts(rest, TIMM_SWIN, true)),
        Some((stage, ("downsample", rest))) => format!("features.{}.{rest}", 2 * stage),
        _ => swap_parts(theirs, &[("head", "head.fc")], true),
    }
}

/// Detectron2's name of a tensor of torchvision's ResNet.
pub fn detectron2_name(ours: &str) -> String {
    let mut name = if ours.starts_with("layer") { ours.to_string() } else { format!("stem.{ours}") };
    for t in 1..=4 {
        name = name.replace(&format!("layer{t}."), &format!("res{}.", t + 1));
    }
    for t in 1..=3 {
        name = name.replace(&format!("bn{t}."), &format!("conv{t}.norm."));
    }
    name.replace("downsample.0.", "shortcut.").replace("downsample.1.", "shortcut.norm.")
}

/// The way back.
pub fn from_detectron2_name(theirs: &str) -> String {
    let mut name = theirs.strip_prefix("stem.").unwrap_or(theirs).replace("shortcut.norm.", "downsample.1.");
    name = name.replace("shortcut.", "downsample.0.");
    for t in 1..=3 {
        name = name.replace(&format!("conv{t}.norm."), &format!("bn{t}."));
    }
    for t in 1..=4 {
        name = name.replace(&format!("res{}.", t + 1), &format!("layer{t}."));
    }
    name
}

/// numpy's names of the types a network has.
const DTYPES: &[(Kind, &str)] = &[(Kind::Float, "f4"), (Kind::Double, "f8"), (Kind::Int64, "i8")];

/// Writes tensors under Detectron2's names in the pickle its checkpointer knows: `{"model": {name: array}, "__author__": ..., "matching_heuristics": True}`.
pub fn save_detectron2(path: &Path, theirs: &Named) -> Result<()> {
    let mut out = pickle::Writer::new(3);
    out.ops(b"}(").text("model").ops(b"}(");
    for (name, tensor) in theirs {
        out.text(name);
        array(&mut out, name, tensor)?;
    }
    out.ops(b"u").text("__author__").text("mcl").text("matching_heuristics").ops(b"\x88u");
    files::write(path, &out.finish())
}

/// An ndarray as numpy pickles it: `_reconstruct(ndarray, (0,), b"b")` with the state (1, shape, dtype, False, bytes).
fn array(out: &mut pickle::Writer, name: &str, tensor: &Tensor) -> Result<()> {
    let (_, dtype) = DTYPES
        .iter()
        .find(|(kind, _)| *kind == tensor.kind())
        .ok_or_else(|| Error::failed(format!("`{name}` is of type {:?}, which is not written as a numpy array", tensor.kind())))?;
    out.global("numpy.core.multiarray", "_reconstruct").ops(b"(").global("numpy", "ndarray").ints(&[0]).ops(b"C\x01btR(");
    out.int(1).ints(&tensor.size()).global("numpy", "dtype").ops(b"(").text(dtype);
    // align = False, copy = True; then the byte order, with nothing special about the type.
    out.ops(b"\x89\x88tR(").int(3).text("<").ops(b"NNN").int(-1).int(-1).int(0).ops(b"tb\x89");
    if !out.bytes(&files::tensor_bytes(tensor)) {
        return Err(Error::failed(format!("`{name}` is larger than a pickle of protocol 3 holds")));
    }
    out.ops(b"tb");
    Ok(())
}

/// The tensors of such a pickle under our names.
pub fn read_detectron2(path: &Path) -> Result<Named> {
    let data = std::fs::read(path).map_err(Error::open(path))?;
    let fault = |what: String| Error::file(path, what);
    let (value, _) = pickle::read(&data).map_err(fault)?;
    let model = value.get("model").and_then(|m| m.as_dict()).ok_or_else(|| fault("holds no `model`".to_string()))?;
    let tensor = |(name, value): &(pickle::Value, pickle::Value)| {
        let name = name.as_str().ok_or_else(|| fault("a name that is no text".to_string()))?;
        let array = value.as_array().map_err(|e| fault(format!("{name}: {e}")))?;
        let (kind, _) = DTYPES
            .iter()
            .find(|(_, dtype)| *dtype == array.dtype)
            .ok_or_else(|| fault(format!("{name}: type {} is not supported", array.dtype)))?;
        let shape: Vec<i64> = array.shape.iter().map(|&d| d as i64).collect();
        Ok((from_detectron2_name(name), Tensor::f_from_data_size(&array.data, &shape, *kind)?))
    };
    model.iter().map(tensor).collect()
}
