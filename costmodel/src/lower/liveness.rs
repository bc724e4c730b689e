//! How much memory a pass needs beside what is kept: the peak of tensors between their first and
//! last use.

use catalog::Bytes;
use dtensor::{TensorId, TensorRole, Trace};
use rustc_hash::{FxHashMap, FxHashSet};

use super::kernel::Kernel;

/// Peak bytes of tensors that these kernels write and that are not in `kept`, each alive from its
/// write to its last read. `fused_weight_gradients` says that weight gradients go straight into
/// the accumulation buffer.
#[must_use]
pub fn peak_transient(
    trace: &Trace,
    kernels: &[Kernel],
    kept: &FxHashSet<TensorId>,
    fused_weight_gradients: bool,
) -> Bytes {
    let last = last_use(trace, kernels);
    let mut live = Bytes(0);
    let mut peak = Bytes(0);
    let mut alive: FxHashSet<TensorId> = FxHashSet::default();
    for (index, kernel) in kernels.iter().enumerate() {
        let weight_gradient =
            kernel.pass == dtensor::Pass::BackwardWeight && fused_weight_gradients;
        for &id in &kernel.writes {
            let storage = trace.tensor(id).storage;
            let info = trace.tensor(storage);
            let counts = matches!(info.role, TensorRole::Activation | TensorRole::Gradient)
                && !kept.contains(&storage)
                && !weight_gradient;
            if counts && alive.insert(storage) {
                live += info.bytes();
            }
        }
        peak = peak.max(live);
        for &id in kernel.reads.iter().chain(&kernel.writes) {
            let storage = trace.tensor(id).storage;
            let done = last.get(&storage).is_none_or(|&at| at <= index);
            let leaves = trace
                .output
                .is_some_and(|o| trace.tensor(o).storage == storage);
            if done && !leaves && alive.remove(&storage) {
                live = live.saturating_sub(trace.tensor(storage).bytes());
            }
        }
    }
    peak
}

fn last_use(trace: &Trace, kernels: &[Kernel]) -> FxHashMap<TensorId, usize> {
    let mut last = FxHashMap::default();
    for (index, kernel) in kernels.iter().enumerate() {
        for &id in &kernel.reads {
            last.insert(trace.tensor(id).storage, index);
        }
    }
    last
}
