//! Layers divided over pools that differ in speed.

use plans::partition::MAX_BY_POOL;
use plans::{ScheduleKind, StagePartition, schedule};
use proptest::prelude::*;

proptest! {
    /// Layers of a rank's stages differ by at most one; so do those of a pool's ranks, in one pool
    /// only.
    #[test]
    fn every_way_gives_all_layers_and_is_uneven_in_one_pool(
        layers in 1..130u64,
        ranks in prop::collection::vec(1..6usize, 2..5),
        vpp in 1..5u64,
        in_a_v in any::<bool>(),
    ) {
        let owners: Vec<usize> = (ranks.iter().enumerate())
            .flat_map(|(pool, &count)| vec![pool; count])
            .collect();
        let (kind, vpp) = match (in_a_v, vpp) {
            (true, _) => (ScheduleKind::ZbV, 2),
            (false, 1) => (ScheduleKind::OneFOneB, 1),
            (false, _) => (ScheduleKind::Interleaved, vpp),
        };
        let rank_of_stage = schedule::rank_of_stage(kind, owners.len() as u64, vpp);
        let ways = StagePartition::by_pool(layers, &owners, &rank_of_stage);
        prop_assert!(ways.len() <= MAX_BY_POOL);
        prop_assert_eq!(ways.is_empty(), layers < rank_of_stage.len() as u64);
        for way in &ways {
            prop_assert_eq!(way.layers(), layers);
            prop_assert_eq!(way.0.len(), rank_of_stage.len());
            let mut of_rank = vec![0; owners.len()];
            for (rank, total) in of_rank.iter_mut().enumerate() {
                let stages = way.0.iter().zip(&rank_of_stage);
                let own = stages.filter(|(_, owner)| **owner as usize == rank);
                let own: Vec<u64> = own.map(|(&size, _)| size).collect();
                let [least, most] = [own.iter().min(), own.iter().max()].map(Option::unwrap);
                prop_assert!(*least >= 1 && most - least <= 1, "{}", way.runs());
                *total = own.iter().sum();
            }
            let mut rest = &of_rank[..];
            let mut uneven = 0;
            for &count in &ranks {
                let (pool, others) = rest.split_at(count);
                let [least, most] = [pool.iter().min(), pool.iter().max()].map(Option::unwrap);
                prop_assert!(most - least <= 1, "{}", way.runs());
                uneven += usize::from(least != most);
                rest = others;
            }
            prop_assert!(uneven <= 1, "{}", way.runs());
        }
    }

    /// The list includes all ways in which the stages of each pool are equal.
    #[test]
    fn equal_stages_of_every_pool_are_tried(
        ranks in prop::collection::vec(1..4u64, 2..4),
        vpp in 2..9u64,
        sizes in prop::collection::vec(1..5u64, 4),
    ) {
        let owners: Vec<usize> = (ranks.iter().enumerate())
            .flat_map(|(pool, &count)| vec![pool; count as usize])
            .collect();
        let rank_of_stage =
            schedule::rank_of_stage(ScheduleKind::Interleaved, owners.len() as u64, vpp);
        let of_stage = |&rank: &u32| sizes[owners[rank as usize]];
        let equal = StagePartition(rank_of_stage.iter().map(of_stage).collect());
        let ways = StagePartition::by_pool(equal.layers(), &owners, &rank_of_stage);
        prop_assert!(ways.contains(&equal), "{} of {:?}", equal.runs(), ranks);
    }
}

/// With pools of two ranks and of one, every number of layers of the second pool is tried.
#[test]
fn two_pools_are_divided_in_every_way() {
    let ways = |layers: u64, ranks: &[u32]| -> Vec<String> {
        let ways = StagePartition::by_pool(layers, &[0, 0, 1], ranks);
        ways.iter().map(StagePartition::runs).collect()
    };
    assert_eq!(ways(6, &[0, 1, 2]), ["2x1/4", "2/1/3", "3x2", "3/2/1"]);
    // Five layers of the second pool are three in its first stage and two in its second.
    assert!(ways(9, &[0, 1, 2, 0, 1, 2]).contains(&"2x1/3/2x1/2".to_owned()));
    assert!(ways(9, &[0, 1, 2, 2, 1, 0]).contains(&"2x1/3/2/2x1".to_owned()));
}
