//! Pure functions over tensors, and the table a method's losses are handed over in.

pub mod contrast;
pub mod logit;
pub mod terms;
pub mod unit;
