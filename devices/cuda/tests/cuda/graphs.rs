//! Captured work runs again: with the arguments it was recorded with, in memory of its own.

use catalog::DType;
use cuda_device::launcher::{Place, StreamArgument, threshold};
use cuda_device::{CudaError, Device, Tensor};
use dtensor::philox::Stream;

use crate::emulator;

const N: usize = 1000;

fn numbers(device: &Device) -> (Tensor, Vec<f32>) {
    let values: Vec<f32> = (0..N).map(|i| i as f32).collect();
    let host = cpu_device::Tensor::new(vec![N], values.clone(), DType::F32);
    (device.upload(&host).expect("memory"), values)
}

fn read(device: &Device, x: &Tensor) -> Vec<f32> {
    device.download(x).expect("reads").into_f32()
}

#[test]
fn captured_work_runs_again() {
    for device in emulator::devices() {
        let (x, values) = numbers(&device);
        let total = device.zeros(vec![N], DType::F32).expect("memory");
        let work = || {
            let twice = device.add(&x, &x)?;
            device.add_column_sum(&total, &twice.reshaped(vec![1, N]))
        };
        // The first time compiles kernels and takes memory.
        work().expect("runs");
        device.begin_capture().expect("begins");
        work().expect("is recorded");
        let graph = device.end_capture().expect("ends");
        for _ in 0..4 {
            graph.replay().expect("runs");
        }
        let want: Vec<f32> = values.iter().map(|x| 10.0 * x).collect();
        assert_eq!(read(&device, &total), want);
    }
}

#[test]
fn memory_of_captured_work_is_given_to_no_one_else() {
    for device in emulator::devices() {
        let (x, values) = numbers(&device);
        let before = device.add(&x, &x).expect("runs");
        let gone = before.address();
        let usage = device.memory.usage();
        device.begin_capture().expect("begins");
        let twice = device.add(&x, &x).expect("is recorded");
        let passing = device.add(&twice, &x).expect("is recorded");
        let inside = passing.address();
        drop(passing);
        let again = device.add(&twice, &before).expect("is recorded");
        assert_eq!(again.address(), inside, "one run is ordered in itself");
        // What is recorded reads it each time it runs.
        drop(before);
        let other = device.add(&x, &x).expect("is recorded");
        assert_ne!(other.address(), gone);
        drop((twice, other));
        let graph = device.end_capture().expect("ends");
        assert_eq!(
            device.memory.usage().live,
            usage.live,
            "what was asked for counts"
        );
        let others: Vec<Tensor> = (0..8)
            .map(|_| device.zeros(vec![N], DType::F32).expect("memory"))
            .collect();
        assert!(
            others
                .iter()
                .all(|o| ![gone, inside].contains(&o.address()))
        );
        graph.replay().expect("runs");
        let want: Vec<f32> = values.iter().map(|x| 4.0 * x).collect();
        assert_eq!(read(&device, &again), want);
        assert!(
            others
                .iter()
                .all(|other| read(&device, other).iter().all(|&x| x == 0.0))
        );
        // Given back once nothing runs there: its four pieces, beside those of the others.
        drop((graph, again, others));
        let reserved = device.memory.usage().reserved;
        let many: Vec<Tensor> = (0..8 + 4)
            .map(|_| device.zeros(vec![N], DType::F32).expect("memory"))
            .collect();
        assert!(many.iter().any(|x| x.address() == gone));
        assert_eq!(device.memory.usage().reserved, reserved);
    }
}

#[test]
fn random_numbers_follow_the_step_that_is_in_memory() {
    for device in emulator::devices() {
        let (x, _) = numbers(&device);
        let x = x.reshaped(vec![1, 10, 100]);
        let positions: Vec<u32> = (0..10).collect();
        let positions = device.indices(&positions).expect("memory");
        let step = device.indices(&[0]).expect("memory");
        let masks = |stream: Stream| {
            let place = Place {
                stream: StreamArgument::new(stream, step.address),
                threshold: threshold(0.5),
                scale: 2.0,
                first_sequence: 0,
                sequence: [10, 10],
                columns: [100, 0, 100],
            };
            device.dropout(&x, place, &positions)
        };
        masks(Stream::new(7, 0, "dropout")).expect("runs");
        device.begin_capture().expect("begins");
        let (out, _mask) = masks(Stream::new(7, 0, "dropout")).expect("is recorded");
        let graph = device.end_capture().expect("ends");
        for word in [0u32, 1, 9] {
            let bytes = bytemuck::bytes_of(&word);
            device.launcher.write(step.address, bytes).expect("writes");
            graph.replay().expect("runs");
            let mut uniforms = vec![0.0; N];
            Stream::new(7, word, "dropout").uniforms(0, &mut uniforms);
            for (i, (got, u)) in read(&device, &out).iter().zip(&uniforms).enumerate() {
                let want = if *u >= 0.5 { 2.0 * i as f32 } else { 0.0 };
                assert_eq!(*got, want, "step {word}, element {i}");
            }
        }
    }
}

#[test]
fn what_needs_the_host_is_refused() {
    for device in emulator::devices() {
        let (x, _) = numbers(&device);
        device.begin_capture().expect("begins");
        let refused = [
            device.download(&x).map(drop),
            device.indices(&[1]).map(drop),
            device.launcher.mark(),
            device.launcher.synchronize(),
        ];
        let graph = device.end_capture().expect("ends all the same");
        for result in refused {
            assert!(
                matches!(result, Err(CudaError::Captured { .. })),
                "{result:?}"
            );
        }
        graph.replay().expect("runs nothing");
    }
}
