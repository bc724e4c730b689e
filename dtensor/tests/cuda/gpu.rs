//! What only a GPU can show: NCCL and captured graphs. Run with `VESCALE_TEST_GPU=1`.

use std::rc::Rc;
use std::time::Duration;

use dtensor::comm::{Group, local};
use dtensor::cpu;
use dtensor::cuda::{Device, Gpu, NcclGroup, Reduction, Tensor};
use spec::DType;

use crate::emulator::ON_GPU;

fn gpu() -> Option<(Rc<Gpu>, Device)> {
    if std::env::var_os(ON_GPU).is_none() {
        eprintln!("not tested: {ON_GPU} is not set");
        return None;
    }
    let gpu = Rc::new(Gpu::new(0).expect("a GPU"));
    let device = Device::new(Rc::<Gpu>::clone(&gpu));
    Some((gpu, device))
}

fn numbers(device: &Device, dtype: DType) -> (Tensor, Vec<f32>) {
    let host = cpu::Tensor::new(vec![1000], (0..1000).map(|i| i as f32).collect(), dtype);
    let values = host.f32().into_owned();
    (device.upload(&host).expect("memory"), values)
}

#[test]
fn every_collective_with_one_rank() {
    let Some((gpu, device)) = gpu() else {
        return;
    };
    let world = local::world(1, Duration::from_secs(10));
    let comm = &world[0];
    let group = NcclGroup::new(gpu, comm, &Group::single(0)).expect("NCCL starts");
    for dtype in [DType::F32, DType::Bf16] {
        let (x, values) = numbers(&device, dtype);
        let same = |x: &Tensor| {
            let timeout = Duration::from_secs(10);
            group.finish(comm, "test", timeout).expect("nobody failed");
            assert_eq!(device.download(x).expect("reads").into_f32(), values);
        };
        let other = || device.zeros(vec![1000], dtype).expect("memory");
        for reduction in [Reduction::Sum, Reduction::Max] {
            group.all_reduce(&x, reduction).expect("reduces");
            same(&x);
        }
        group.broadcast(&x, 0).expect("sends");
        same(&x);
        let to = other();
        group.all_gather(&x, &to).expect("gathers");
        same(&to);
        let to = other();
        group.reduce_scatter(&x, &to).expect("reduces");
        same(&to);
        let to = other();
        group.all_to_all(&x, &to).expect("sends");
        same(&to);
        let to = other();
        group
            .exchange(Some((&x, 0)), Some((&to, 0)))
            .expect("sends");
        same(&to);
    }
}

#[test]
fn captured_work_runs_again() {
    let Some((gpu, device)) = gpu() else {
        return;
    };
    let (x, values) = numbers(&device, DType::F32);
    let total = device.zeros(vec![1000], DType::F32).expect("memory");
    let work = || {
        let twice = device.add(&x, &x)?;
        device.add_column_sum(&total, &twice.reshaped(vec![1, 1000]))
    };
    // The first time compiles kernels and takes memory.
    work().expect("runs");
    let graph = gpu.capture(work).expect("captures");
    let before = gpu.launches();
    for _ in 0..4 {
        gpu.replay(&graph).expect("runs");
    }
    assert_eq!(gpu.launches(), before);
    let want: Vec<f32> = values.iter().map(|x| 10.0 * x).collect();
    assert_eq!(device.download(&total).expect("reads").into_f32(), want);
}
