//! Messages between GPUs that are measured: over a grid, or those that a plan's ranks exchange.

use dtensor::{CollectiveKind, OpKind};
use plans::{Axis, Strategy, Zero};
use profiler::BlockRequest;
use profiler::cuda::{COLLECTIVES, Collective, Exchange, group_sizes};

use crate::args::SuiteArg;

/// Every collective between so many GPUs, and between fewer of them.
pub(super) fn grid(suite: SuiteArg, gpus: u64) -> Vec<Exchange> {
    let sizes = group_sizes(gpus);
    let of = |ranks: &u64| over_sizes(suite, &COLLECTIVES, *ranks);
    sizes.iter().flat_map(of).collect()
}

fn over_sizes(suite: SuiteArg, collectives: &[Collective], ranks: u64) -> Vec<Exchange> {
    let bytes: Vec<u64> = match suite {
        SuiteArg::Quick => [12, 16, 20, 24, 28].map(|power| 1 << power).into(),
        SuiteArg::Full => (4..=15).map(|power| 1 << (2 * power)).collect(),
    };
    let of = |&collective: &Collective| {
        bytes.iter().map(move |&bytes| Exchange {
            collective,
            ranks,
            bytes,
        })
    };
    collectives.iter().flat_map(of).collect()
}

/// What ranks exchange inside a block, at the sizes they do.
pub(super) fn of_block(block: &BlockRequest) -> Vec<Exchange> {
    let trace = &block.trace;
    let ops = trace.forward.iter().chain(&trace.backward);
    let collectives = ops.filter_map(|op| match op.kind {
        OpKind::Collective(collective) => Some(collective),
        _ => None,
    });
    let exchange = |c: dtensor::Collective| Exchange {
        collective: named(c.kind),
        ranks: block.position.mesh.size(c.axis),
        bytes: c.bytes,
    };
    collectives.map(exchange).collect()
}

fn named(kind: CollectiveKind) -> Collective {
    match kind {
        CollectiveKind::AllReduce => Collective::AllReduce,
        CollectiveKind::AllGather => Collective::AllGather,
        CollectiveKind::ReduceScatter => Collective::ReduceScatter,
        CollectiveKind::AllToAll => Collective::AllToAll,
        CollectiveKind::Broadcast => Collective::Broadcast,
        CollectiveKind::RingExchange | CollectiveKind::SendRecv => Collective::SendAndReceive,
    }
}

/// What ranks exchange beside blocks: parameters and gradients in buckets over a range of sizes, stages' activations
/// of so many bytes, the gradient norm.
pub(super) fn beside_blocks(
    strategy: &Strategy,
    activation: u64,
    suite: SuiteArg,
) -> Vec<Exchange> {
    let mut exchanges = Vec::new();
    let copies = if strategy.zero == Zero::Z0 {
        1
    } else {
        strategy.dp_replicate
    };
    let dense = strategy.cp * strategy.dp_shard * strategy.dp_replicate / copies;
    let expert = strategy.group(Axis::Edp).size / copies;
    let shares: &[Collective] = match strategy.zero {
        Zero::Z0 => &[Collective::AllReduce],
        Zero::Z1 | Zero::Z2 | Zero::Z3 => &[Collective::AllGather, Collective::ReduceScatter],
    };
    for ranks in [dense, expert] {
        exchanges.extend(over_sizes(suite, shares, ranks));
    }
    exchanges.extend(over_sizes(suite, &[Collective::AllReduce], copies));
    let one = |collective, ranks, bytes| Exchange {
        collective,
        ranks,
        bytes,
    };
    exchanges.push(one(Collective::AllReduce, strategy.world(), 8));
    if strategy.pp > 1 {
        exchanges.push(one(Collective::SendAndReceive, 2, activation));
    }
    exchanges
}

/// Those between several of the GPUs that are here, once each; and how many GPUs the others are between.
pub(super) fn possible(exchanges: Vec<Exchange>, gpus: u64) -> (Vec<Exchange>, Vec<u64>) {
    let (mut here, mut beyond) = (Vec::new(), Vec::new());
    for exchange in exchanges.into_iter().filter(|e| e.ranks > 1) {
        if exchange.ranks > gpus {
            beyond.push(exchange.ranks);
        } else if !here.contains(&exchange) {
            here.push(exchange);
        }
    }
    beyond.sort_unstable();
    beyond.dedup();
    (here, beyond)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(ranks: u64, bytes: u64) -> Exchange {
        Exchange {
            collective: Collective::AllReduce,
            ranks,
            bytes,
        }
    }

    #[test]
    fn messages_are_measured_where_there_are_gpus_for_them() {
        for (gpus, wanted, beyond) in [
            (1, vec![], vec![2, 8]),
            (4, vec![all(2, 8), all(2, 16)], vec![8]),
            (8, vec![all(2, 8), all(8, 8), all(2, 16)], vec![]),
        ] {
            let asked = vec![all(1, 8), all(2, 8), all(8, 8), all(2, 16), all(2, 8)];
            assert_eq!(possible(asked, gpus), (wanted, beyond), "{gpus}");
        }
    }

    #[test]
    fn grids_have_every_collective_between_every_number_of_gpus() {
        for (suite, gpus, wanted) in [
            (SuiteArg::Quick, 1, 0),
            (SuiteArg::Quick, 2, 6 * 5),
            (SuiteArg::Full, 8, 3 * 6 * 12),
        ] {
            assert_eq!(grid(suite, gpus).len(), wanted);
        }
    }
}
