//! Vectors of length 1: rows divided by their l2 norm. The one place that does so.

use tch::Tensor;

/// How rows of the last dimension are brought to length 1. Vectors that are not near zero come out the same each way but for the last
/// bit; what differs is what becomes of a vector of zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norm {
    /// x / max(|x|, 1e-12), as torch's `normalize`: a vector of zeros stays one. The paper names no guard, so paper mode takes this one.
    Guarded,
    /// x / sqrt(sum x^2), as L-MCL's released code writes it: no guard, a vector of zeros gives NaN. For reference mode.
    Bare,
    /// x / sqrt(max(sum x^2, 1e-12)): the guard is within the root, so that the gradient is finite where two features coincide and their
    /// difference is zero, which happens in every table of differences (CKD-MKT's angles).
    GuardedSquare,
}

impl Norm {
    /// `xs` [.., d] with every row of the last dimension divided by its length.
    pub fn apply(self, xs: &Tensor) -> Tensor {
        match self {
            Norm::Guarded => xs / lengths(xs).clamp_min(1e-12),
            Norm::Bare => xs / xs.pow_tensor_scalar(2).sum_dim_intlist(-1i64, true, None).sqrt(),
            Norm::GuardedSquare => xs / xs.square().sum_dim_intlist(-1i64, true, None).clamp_min(1e-12).sqrt(),
        }
    }
}

/// The l2 norm of every row of the last dimension, [.., d] -> [.., 1].
pub(crate) fn lengths(xs: &Tensor) -> Tensor {
    xs.norm_scalaropt_dim(2.0, [-1i64].as_slice(), true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_length_one_and_zeros_do_what_is_said() {
        let rows = Tensor::from_slice(&[3.0f64, 4.0, 0.0, 0.0]).view([2, 2]);
        let values = |norm: Norm| Vec::<f64>::try_from(norm.apply(&rows).view([-1])).unwrap();
        assert_eq!(values(Norm::Guarded), [0.6, 0.8, 0.0, 0.0]);
        assert_eq!(values(Norm::GuardedSquare), [0.6, 0.8, 0.0, 0.0]);
        let bare = values(Norm::Bare);
        assert!(bare[..2] == [0.6, 0.8] && bare[2..].iter().all(|v| v.is_nan()), "{bare:?}");
    }
}
