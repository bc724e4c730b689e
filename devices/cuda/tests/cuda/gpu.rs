//! What only a GPU can test: NCCL and cuDNN. Run with `VESCALE_TEST_GPU=1`.

use std::rc::Rc;
use std::time::Duration;

use catalog::DType;
use comm::{Group, local};
use cuda_device::{Collective, CudaError, Device, Gpu, Links, Name, NcclGroup, NcclLinks, Tensor};
use dtensor::CausalAttention;

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

/// Where cuDNN is installed, it runs the attention of a Llama; otherwise the test prints why not.
#[test]
fn cudnn_runs_attention() {
    let Some((_, device)) = gpu() else {
        return;
    };
    if let Err(error) = Name::Cudnn.open() {
        eprintln!("not tested: {error}");
        return;
    }
    let of = CausalAttention {
        batch: 2,
        length: 4096,
        heads: [32, 8],
        dims: [128, 128],
        window: None,
    };
    let asked = device.launcher.attention_workspaces(&of);
    let [_, backward] = asked.expect("it works").expect("it takes the sizes");
    let predicted = of.backward_workspace();
    assert!(
        backward.abs_diff(predicted) * 50 < predicted,
        "{backward}, predicted {predicted}"
    );
}

fn numbers(device: &Device, dtype: DType) -> (Tensor, Vec<f32>) {
    let host = cpu_device::Tensor::new(vec![1000], (0..1000).map(|i| i as f32).collect(), dtype);
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
        let one = |x: &Tensor| std::slice::from_ref(x).to_vec();
        type Call<'c> = &'c dyn Fn(&Tensor, &Tensor) -> Result<(), CudaError>;
        let calls: [Call<'_>; 6] = [
            &|x, to| group.all_reduce(x, to),
            &|x, to| group.reduce(x, to, 0),
            &|x, to| group.broadcast(x, to, 0),
            &|x, to| group.all_gather(x, to),
            &|x, to| group.reduce_scatter(x, to),
            &|x, to| group.all_to_all(&one(x), &one(to)),
        ];
        for call in calls {
            let to = other();
            call(&x, &to).expect("runs");
            same(&to);
        }
    }
}

/// A side queue runs after the point where it forks, and the main queue after it where they join.
/// The same holds when both are captured.
#[test]
fn queues_fork_and_join() {
    let Some((gpu, device)) = gpu() else {
        return;
    };
    let world = local::world(1, Duration::from_secs(10));
    let group = NcclGroup::beside(Rc::clone(&gpu), &world[0], &Group::single(0));
    let group = group.expect("NCCL starts");
    let side = group.side().expect("it is beside");
    let (x, values) = numbers(&device, DType::F32);
    let [sum, total] = [(); 2].map(|()| device.zeros(vec![1000], DType::F32).expect("memory"));
    let work = || -> Result<(), CudaError> {
        let twice = device.add(&x, &x)?;
        gpu.fork(side)?;
        group.all_reduce(&twice, &sum)?;
        gpu.join(&gpu.end_of(side)?)?;
        device.add_into(&total, &sum)
    };
    for _ in 0..100 {
        work().expect("runs");
    }
    device.begin_capture().expect("begins");
    let recorded = work();
    let graph = device.end_capture().expect("both queues have joined");
    recorded.expect("is recorded");
    for _ in 0..100 {
        graph.replay().expect("runs");
    }
    group
        .finish(&world[0], "test", Duration::from_secs(10))
        .expect("nobody failed");
    let got = device.download(&total).expect("reads").into_f32();
    let want: Vec<f32> = values.iter().map(|x| 400.0 * x).collect();
    assert_eq!(got, want);
    // The graph must be dropped before the group whose messages it captured.
    drop(graph);
}

/// Messages of a rank to itself, and in groups of one rank.
#[test]
fn links_of_one_rank() {
    let Some((gpu, device)) = gpu() else {
        return;
    };
    let world = local::world(1, Duration::from_secs(10));
    let links = NcclLinks::new(gpu, &world[0], Duration::from_secs(10)).expect("NCCL is here");
    let (x, values) = numbers(&device, DType::F32);
    let to = device.zeros(vec![1000], DType::F32).expect("memory");
    let sending = links.send(0, 7, "test", &x).expect("sends");
    links.receive(0, 7, "test", &to).expect("receives");
    links.wait(sending).expect("has arrived");
    let (group, both) = (Group::single(0), std::slice::from_ref(&to));
    let reduced = links.exchange(Collective::AllReduce, &group, "test", both, both);
    reduced.expect("reduces and joins");
    links.settle("test").expect("nobody failed");
    assert_eq!(device.download(&to).expect("reads").into_f32(), values);
}
