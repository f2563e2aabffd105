//! A Rust program that runs an exported network with tch alone: cargo run --release --example consumer resnet18.pt

use tch::{CModule, Device, IValue, Kind, Tensor};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let file = std::env::args().nth(1).ok_or("usage: consumer FILE.pt")?;
    let body = CModule::load(&file)?;
    let images = Tensor::rand([1, 3, 224, 224], (Kind::Float, Device::Cpu));
    match tch::no_grad(|| body.forward_is(&[IValue::Tensor(images)]))? {
        IValue::GenericDict(maps) => maps.iter().for_each(|(name, map)| println!("{name:?} {map:?}")),
        // Exported with its classifier.
        IValue::Tensor(logits) => println!("logits {:?}", logits.size()),
        other => return Err(format!("{file} answers with {other:?}").into()),
    }
    Ok(())
}
