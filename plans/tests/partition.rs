//! Layers divided over pools that differ in speed.

use plans::StagePartition;
use plans::partition::MAX_BY_POOL;
use proptest::prelude::*;

proptest! {
    #[test]
    fn every_way_gives_all_layers_and_is_uneven_in_one_pool(
        layers in 1..130u64,
        ranks in prop::collection::vec(1..6usize, 2..5),
    ) {
        let owners: Vec<usize> = (ranks.iter().enumerate())
            .flat_map(|(pool, &count)| vec![pool; count])
            .collect();
        let ways = StagePartition::by_pool(layers, &owners);
        prop_assert!(ways.len() <= MAX_BY_POOL);
        prop_assert_eq!(ways.is_empty(), (layers as usize) < owners.len());
        for way in &ways {
            prop_assert_eq!(way.layers(), layers);
            prop_assert_eq!(way.0.len(), owners.len());
            let mut rest = &way.0[..];
            let mut uneven = 0;
            for &count in &ranks {
                let (pool, others) = rest.split_at(count);
                let [least, most] = [pool.iter().min(), pool.iter().max()].map(Option::unwrap);
                prop_assert!(*least >= 1 && most - least <= 1, "{}", way.runs());
                uneven += usize::from(least != most);
                rest = others;
            }
            prop_assert!(uneven <= 1, "{}", way.runs());
        }
    }
}

/// Of two pools with two ranks and one, every number of layers of the second is tried.
#[test]
fn two_pools_are_divided_in_every_way() {
    let ways = StagePartition::by_pool(6, &[0, 0, 1]);
    let ways: Vec<String> = ways.iter().map(StagePartition::runs).collect();
    assert_eq!(ways, ["2x1/4", "2/1/3", "3x2", "3/2/1"]);
}
