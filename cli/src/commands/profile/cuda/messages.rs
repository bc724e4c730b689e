//! Which messages between GPUs are measured: a grid, or those that a plan's ranks exchange.

use dtensor::{CollectiveKind, CostClass};
use plans::{Axis, Strategy, Zero};
use profiler::BlockRequest;
use profiler::cuda::{COLLECTIVES, Collective, Exchange, MOST_RANKS, group_sizes};

use crate::args::SuiteArg;

/// Every collective between this many GPUs, and between fewer of them.
pub(super) fn grid(suite: SuiteArg, gpus: u64) -> Vec<Exchange> {
    let sizes = group_sizes(gpus);
    let of = |ranks: &u64| over_sizes(suite, COLLECTIVES, *ranks);
    sizes.iter().flat_map(of).collect()
}

fn over_sizes(suite: SuiteArg, collectives: &[Collective], ranks: u64) -> Vec<Exchange> {
    let bytes: Vec<u64> = match suite {
        SuiteArg::Quick => [12, 16, 20, 24, 28].map(|power| 1 << power).into(),
        SuiteArg::Full => (4..=15).map(|power| 1 << (2 * power)).collect(),
    };
    let of = |&collective: &Collective| {
        let of = move |&bytes| Exchange::inside(collective, ranks, bytes);
        bytes.iter().map(of)
    };
    collectives.iter().flat_map(of).collect()
}

/// Exchanges between this many hosts with this many GPUs each, and between fewer: groups with one GPU of each host,
/// with all, and with sizes in between. Point-to-point messages go from host to host.
pub(super) fn over_hosts(suite: SuiteArg, hosts: u64, per_host: u64) -> Vec<Exchange> {
    let shared = [
        Collective::AllReduce,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::AllToAll,
    ];
    let spread = |collectives: &[Collective], hosts: u64, together: u64| {
        let inside = over_sizes(suite, collectives, hosts * together);
        inside.into_iter().map(move |e| Exchange { together, ..e })
    };
    let mut exchanges = Vec::new();
    for hosts in group_sizes(hosts) {
        for together in [1].into_iter().chain(group_sizes(per_host)) {
            if hosts * together <= MOST_RANKS {
                exchanges.extend(spread(&shared, hosts, together));
            }
        }
    }
    if hosts > 1 {
        exchanges.extend(spread(&[Collective::SendAndReceive], 2, 1));
    }
    exchanges
}

/// Exchanges of ranks inside a block, at their actual sizes.
pub(super) fn of_block(block: &BlockRequest) -> Vec<Exchange> {
    let collectives = block.trace.ops().filter_map(|op| match op.cost() {
        CostClass::Collective(collective) => Some(collective),
        _ => None,
    });
    let exchange = |c: dtensor::Collective| {
        let ranks = block.position.mesh.size(c.axis);
        Exchange::inside(named(c.kind), ranks, c.bytes)
    };
    collectives.map(exchange).collect()
}

fn named(kind: CollectiveKind) -> Collective {
    match kind {
        CollectiveKind::AllReduce => Collective::AllReduce,
        CollectiveKind::AllGather => Collective::AllGather,
        CollectiveKind::ReduceScatter => Collective::ReduceScatter,
        CollectiveKind::AllToAll => Collective::AllToAll,
        CollectiveKind::RingExchange | CollectiveKind::SendRecv => Collective::SendAndReceive,
    }
}

/// Exchanges of ranks outside blocks: parameters and gradients in buckets over a range of sizes, activations of this
/// many bytes between stages, the gradient norm.
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
    let one = Exchange::inside;
    exchanges.push(one(Collective::AllReduce, strategy.world(), 8));
    if strategy.pp > 1 {
        exchanges.push(one(Collective::SendAndReceive, 2, activation));
    }
    exchanges
}

/// The exchanges that can run on the available GPUs, without duplicates; and the group sizes of those that cannot.
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
        Exchange::inside(Collective::AllReduce, ranks, bytes)
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

    #[test]
    fn hosts_exchange_with_as_many_gpus_as_plans_have_on_each() {
        for (hosts, per_host, groups) in [
            (1, 8, &[][..]),
            (2, 2, &[[2, 1], [4, 2]]),
            (4, 1, &[[2, 1], [4, 1]]),
            (128, 8, &[[2, 1], [512, 4], [256, 8], [128, 1]]),
        ] {
            let exchanges = over_hosts(SuiteArg::Quick, hosts, per_host);
            for &[ranks, together] in groups {
                let of = |e: &&Exchange| (e.ranks, e.together) == (ranks, together);
                let passed = usize::from(ranks == 2);
                assert_eq!(
                    exchanges.iter().filter(of).count(),
                    5 * (4 + passed),
                    "{ranks}"
                );
            }
            assert!(
                exchanges
                    .iter()
                    .all(|e| e.ranks <= MOST_RANKS && e.together < e.ranks)
            );
            assert_eq!(exchanges.is_empty(), groups.is_empty());
        }
    }
}
