//! The device that is not there does what the others rely on.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::{Device, Kind, Tensor};

use crate::{cuda, support};

const GPU: Device = Device::Cuda(0);

fn number(t: &Tensor) -> f64 {
    t.double_value(&[])
}

on_device! {
    /// Two devices, tensors that stay where they are made, and libtorch's own error where they meet.
    fn tensors_do_not_cross_devices() {
        assert_eq!(tch::Cuda::device_count(), 2);
        let here = Tensor::from_slice(&[1f32, 2.0, 3.0]);
        let (zero, one) = (here.to_device(GPU), here.to_device(Device::Cuda(1)));
        assert_eq!((zero.device(), one.device()), (GPU, Device::Cuda(1)));
        assert_eq!(Vec::<f32>::try_from((&zero * 2.0 + &zero).to_device(Device::Cpu)).unwrap(), [3.0, 6.0, 9.0]);
        for (a, b) in [(&zero, &one), (&zero, &here), (&here, &zero)] {
            let message = a.f_add(b).unwrap_err().to_string();
            assert!(message.contains("Expected all tensors to be on the same device"), "{message}");
            let message = a.shallow_clone().f_add_(b).unwrap_err().to_string();
            assert!(message.contains("Expected all tensors to be on the same device"), "{message}");
        }
        // A single number may come from the host, but not take one in.
        assert_eq!(number(&(&zero + Tensor::from(1f32)).sum(None)), 9.0);
        assert!(Tensor::from(1f32).f_add_(&zero.sum(None)).is_err());
    }
}

on_device! {
    /// Fresh memory holds no zeros, and gradients arrive where their tensors are.
    fn memory_is_not_zero_and_gradients_stay_on_the_device() {
        let fresh = Tensor::empty([5], (Kind::Float, GPU));
        assert!(number(&fresh.sum(None)).is_nan());
        let x = Tensor::from_slice(&[1f64, 2.0]).to_device(Device::Cuda(1)).set_requires_grad(true);
        let gradient = Tensor::run_backward(&[(&x * &x).sum(None)], &[&x], false, false).remove(0);
        assert_eq!(gradient.device(), Device::Cuda(1));
        assert_eq!(Vec::<f64>::try_from(gradient.to_device(Device::Cpu)).unwrap(), [2.0, 4.0]);
    }
}

on_device! {
    /// What waits is counted, and refused when that is asked for; what does not wait is let through.
    fn waiting_is_counted_and_refused() {
        let x = Tensor::ones([4], (Kind::Float, GPU));
        let before = cuda::counts().unwrap();
        let y = &x + &x;
        let _ = y.sum(None).double_value(&[]);
        let _ = y.to_device(Device::Cpu);
        let seen = cuda::counts().unwrap().since(before);
        assert_eq!(seen, cuda::Counts { launches: 2, to_device: 0, to_host: 1, reads: 1, waits: 2 });
        let pinned = Tensor::ones([4], (Kind::Float, Device::Cpu)).pin_memory(GPU);
        assert!(pinned.is_pinned(GPU));
        cuda::refuse_waits(true);
        let refused = |what: &str, work: &dyn Fn() -> bool| {
            let raised = catch_unwind(AssertUnwindSafe(work));
            assert!(!matches!(raised, Ok(true)), "{what} was let through");
        };
        refused("a read", &|| x.sum(None).f_double_value(&[]).is_ok());
        refused("a copy to the host", &|| x.f_to_device(Device::Cpu).is_ok());
        refused("a blocking copy to the device", &|| Tensor::ones([2], (Kind::Float, Device::Cpu)).f_to_device(GPU).is_ok());
        refused("a search", &|| x.f_nonzero().is_ok());
        refused("an index in host memory", &|| x.f_index(&[Some(Tensor::from_slice(&[1i64, 2]))]).is_ok());
        refused("an index by mask", &|| x.f_index(&[Some(x.gt(0.0))]).is_ok());
        let sum = (pinned.to_device_(GPU, Kind::Float, true, false) + &x * 3.0).sum(None);
        cuda::refuse_waits(false);
        assert_eq!(number(&sum), 16.0);
    }
}

on_device! {
    /// A pinned buffer that is written again before its copy is through gives other numbers, as on a real device.
    [("FAKE_CUDA_LATE", "1")]
    fn copies_are_late() {
        let mut pinned = Tensor::ones([4], (Kind::Float, Device::Cpu)).pin_memory(GPU);
        let place = pinned.to_device_(GPU, Kind::Float, true, false);
        let _ = pinned.fill_(7.0);
        assert_eq!(number(&place.sum(None)), 28.0, "the copy was not late");
        // The host finds its memory as it was until it waits.
        let back = place.to_device_(Device::Cpu, Kind::Float, true, false);
        assert!(back.is_pinned(GPU));
        let early = back.copy();
        tch::Cuda::synchronize(0);
        assert_eq!(number(&back.sum(None)), 28.0);
        assert_ne!(early, back, "the host did not have to wait");
    }
}

on_device! {
    /// So much memory and no more; what is freed can be had again.
    [("FAKE_CUDA_MEMORY_MB", "10")]
    fn memory_runs_out_as_on_a_real_device() {
        let four = || Tensor::f_zeros([1 << 20], (Kind::Float, GPU)); // 4 MB
        let (first, second) = (four().unwrap(), four().unwrap());
        let message = four().unwrap_err().to_string();
        assert!(message.contains("CUDA out of memory. Tried to allocate 4.0 MiB. GPU 0 has a total capacity of 10.0 MiB of which 2.0 MiB is free."), "{message}");
        assert!(Tensor::f_zeros([1 << 20], (Kind::Float, Device::Cuda(1))).is_ok(), "the other device has memory of its own");
        drop((first, second));
        assert!(four().is_ok());
    }
}
