//! A Rust program that runs an exported backbone with tch alone: cargo run --release --example consumer resnet18.pt

use tch::{CModule, Device, IValue, Kind, Tensor};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let file = std::env::args().nth(1).ok_or("usage: consumer FILE.pt")?;
    let body = CModule::load(file)?;
    let images = Tensor::rand([1, 3, 224, 224], (Kind::Float, Device::Cpu));
    let IValue::GenericDict(maps) = tch::no_grad(|| body.forward_is(&[IValue::Tensor(images)]))? else { return Err("no backbone".into()) };
    for (name, map) in maps {
        println!("{name:?} {map:?}");
    }
    Ok(())
}
